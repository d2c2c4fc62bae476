"""What a finished run comes down to."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from protofed.config import read_toml
from protofed.evaluation.forgetting import accuracy, af, af_literal, base_scratch, bwt, final_accuracy, fwt
from protofed.evaluation.ranking import check_ndcg_hr_ratio, uniform_reference
from protofed.experiments.folder import RunFolder

HEADLINE = (
    ("sampled", "all"),
    ("sampled", "novel"),
    ("sampled", "repeat"),
    ("sampled_hard", "repeat"),
    ("full", "all"),
    ("full", "novel"),
    ("full_unseen", "all"),
)


def matrix(metrics: pa.Table, candidates: str, subset: str, metric: str) -> np.ndarray:
    """A[s, t] of the test parts, NaN where a slice has no such query."""
    size = 1 + pc.max(metrics["slice_trained"]).as_py()
    keep = pc.equal(metrics["split"], "test")
    for column, value in (("candidates", candidates), ("subset", subset), ("metric", metric)):
        keep = pc.and_(keep, pc.equal(metrics[column], value))
    rows = metrics.filter(keep)
    a = np.full((size, size), np.nan)
    a[rows["slice_tested"].to_numpy(), rows["slice_trained"].to_numpy()] = rows["value"].to_numpy()
    return a


def queries_on_diagonal(metrics: pa.Table, candidates: str, subset: str) -> int:
    """How many test queries of slices 1..T a headline number rests on."""
    keep = pc.and_(pc.equal(metrics["split"], "test"), pc.equal(metrics["metric"], "ndcg@10"))
    keep = pc.and_(keep, pc.and_(pc.equal(metrics["candidates"], candidates), pc.equal(metrics["subset"], subset)))
    keep = pc.and_(keep, pc.equal(metrics["slice_trained"], metrics["slice_tested"]))
    keep = pc.and_(keep, pc.greater(metrics["slice_trained"], 0))
    return int(pc.sum(metrics.filter(keep)["n_queries"]).as_py() or 0)


def summarise_run(folder: RunFolder) -> dict[str, object]:
    """Headline accuracy per kind of candidates and subset, forgetting and transfer, warnings."""
    config, metrics = read_toml(folder.path / "config.toml"), folder.table("metrics")
    headline = [
        {
            "candidates": candidates,
            "subset": subset,
            "ndcg@10": accuracy(matrix(metrics, candidates, subset, "ndcg@10")),
            "hr@10": accuracy(matrix(metrics, candidates, subset, "hr@10")),
            "queries": queries_on_diagonal(metrics, candidates, subset),
        }
        for candidates, subset in HEADLINE
        if queries_on_diagonal(metrics, candidates, subset)
    ]
    a = matrix(metrics, "sampled", "all", "ndcg@10")
    random = np.full(len(a), uniform_reference(config.stream.n_negatives + 1)["ndcg@10"])
    warnings = [
        check_ndcg_hr_ratio(row["ndcg@10"], row["hr@10"], row["queries"])  # type: ignore[arg-type]
        for row in headline
    ]
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
