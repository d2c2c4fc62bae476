"""What a finished run comes down to."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from protofed.config import read_toml
from protofed.evaluation.forgetting import accuracy, af, af_literal, base_scratch, bwt, final_accuracy, fwt
from protofed.evaluation.ranking import check_ndcg_hr_ratio, uniform_reference
from protofed.experiments.folder import RunFolder
from protofed.experiments.matrices import matrices

HEADLINE = (
    ("sampled", "all"),
    ("sampled", "novel"),
    ("sampled", "repeat"),
    ("sampled_hard", "repeat"),
    ("full", "all"),
    ("full", "novel"),
    ("full_unseen", "all"),
)


def summarise_run(folder: RunFolder) -> dict[str, Any]:
    """Headline accuracy per kind of candidates and subset, forgetting and transfer, warnings."""
    config, found = read_toml(folder.path / "config.toml"), matrices(folder.table("metrics"))
    headline: list[dict[str, Any]] = [
        {
            "candidates": candidates,
            "subset": subset,
            "ndcg@10": accuracy(found[candidates, subset, "ndcg@10"].values),
            "hr@10": accuracy(found[candidates, subset, "hr@10"].values),
            "queries": queries,
        }
        for candidates, subset in HEADLINE
        if (candidates, subset, "ndcg@10") in found
        and (queries := int(found[candidates, subset, "ndcg@10"].diagonal_queries.sum()))
    ]
    a = found["sampled", "all", "ndcg@10"].values
    random = np.full(len(a), uniform_reference(config.stream.n_negatives + 1)["ndcg@10"])
    warnings = [check_ndcg_hr_ratio(row["ndcg@10"], row["hr@10"], row["queries"]) for row in headline]
    return {
        "dataset": config.dataset,
        "method": config.method,
        "preset": config.preset,
        "seed": config.seed,
        "headline": headline,
        "af": af(a),
        "af_literal": af_literal(a),
        "bwt": bwt(a),
        "fwt_from_random": fwt(a, random),
        "fwt_from_base": fwt(a, base_scratch(a)),
        "final_model_average": final_accuracy(a),
        "warnings": sorted({warning for warning in warnings if warning}),
    }


def headline_ndcg(summary: Mapping[str, Any], candidates: str, subset: str) -> float:
    """NDCG@10 in one row of a summary's headline; NaN where the run had no such query."""
    found = {(row["candidates"], row["subset"]): row["ndcg@10"] for row in summary["headline"]}
    return float(found.get((candidates, subset), math.nan))
