"""What a reader should know before believing a number: one sentence each."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from protofed.evaluation.ranking import LEAST_NDCG_PER_HIT, PILED_UP, check_ndcg_hr_ratio
from protofed.experiments.records import Unfinished
from protofed.report.layout import MOST_NAMED, some
from protofed.report.runs import MAIN
from protofed.report.sections import Section
from protofed.report.tables import PAIRS, Results, key_of

LEAST_WARM_UP = 500  # steps; of three logs below it a longer patience helped two (docs/more_logs.md)


def cautions(results: Sequence[Results], unfinished: Sequence[Unfinished]) -> tuple[str, ...]:
    """Every caution of the report, section by section."""
    found = [f"{found.section.title}: {line}" for found in results for line in _of_section(found)]
    if unfinished:
        runs = "1 run is" if len(unfinished) == 1 else f"{len(unfinished)} runs are"
        names = ", ".join(run.folder for run in unfinished)
        found.append(f"{runs} unfinished and left out of every number: {names}.")
    return tuple(found)


def _of_section(results: Results) -> Iterator[str]:
    section = results.section
    yield from _low_ndcg(results)
    yield from _not_above_trivial(results)
    yield from _few_seeds(section)
    yield from _queries(section)
    yield from _short_warm_up(section)
    without = [label for label, own in results.estimates.items() if not math.isfinite(own[key_of(MAIN)].low)]
    if without:
        why = "per_user.parquet is missing or its seeds differ in queries"
        yield f"no confidence interval for {', '.join(without)}: {why}."
    if section.cut_short:
        yield f"left out because other runs of the same stream reach further slices: {', '.join(section.cut_short)}."
    if section.duplicates:
        yield f"left out because another folder holds the same settings and seed: {', '.join(section.duplicates)}."


def _low_ndcg(results: Results) -> Iterator[str]:
    """One sentence for all rows of a column."""
    for candidates, subset in PAIRS:
        low = {}
        for label, estimates in results.estimates.items():
            ndcg, hits = (estimates[key_of((candidates, subset, name))].mean for name in ("ndcg@10", "hr@10"))
            if check_ndcg_hr_ratio(ndcg, hits):
                low[label] = ndcg / hits
        if low:
            named = some([f"{label} ({ratio:.4f})" for label, ratio in sorted(low.items(), key=lambda row: row[1])])
            found = f"NDCG@10 / HR@10 is below {LEAST_NDCG_PER_HIT:.4f} for {named}"
            yield f"{candidates}, {subset} events: {found}: {PILED_UP}."


def _not_above_trivial(results: Results) -> Iterator[str]:
    """Names those that are above where they are the fewer."""
    rows = [row for row in results.section.rows if not row.is_trivial]
    trivial = [row for row in results.section.rows if row.is_trivial]
    for candidates, subset in PAIRS if trivial else ():
        measure = (candidates, subset, "ndcg@10")
        best = results.best(trivial, measure)
        bar = results.mean(best, measure)
        above = [row.label for row in rows if not results.estimates[row.label][key_of(measure)].mean <= bar]
        losers = [row.label for row in rows if row.label not in above]
        where = f"the trivial row {best.label} ({candidates}, {subset} events, NDCG@10)"
        if len(losers) > MOST_NAMED and len(above) < len(losers):
            yield f"rows above {where}: {some(above) or 'none'}, of {len(rows)}."
        elif losers:
            yield f"{some(losers)} not above {where}."


def _few_seeds(section: Section) -> Iterator[str]:
    seeds = {row.seeds for row in section.rows}
    if len(seeds) > 1:
        listed = "; ".join(f"{row.label}: {', '.join(map(str, row.seeds))}" for row in section.rows)
        yield f"rows have different seeds ({listed})."
    elif len(next(iter(seeds))) == 1:
        yield "one seed per row: there is no spread over seeds, and small differences may be chance."


def _queries(section: Section) -> Iterator[str]:
    """Other numbers of queries under some runs, and slices without any."""
    asked = [run.matrices[MAIN].diagonal_queries if MAIN in run.matrices else np.empty(0) for run in section.runs]
    if len({tuple(queries.tolist()) for queries in asked}) > 1:
        yield "rows were not tested on the same number of queries; compare them with care."
    empty = sorted({int(t) + 1 for queries in asked for t in np.flatnonzero(queries == 0)})
    if empty:
        yield f"no test query in slice {', '.join(map(str, empty))}, which is left out of every average."


def _short_warm_up(section: Section) -> Iterator[str]:
    """A backbone that early stopping left next to untrained handicaps every row alike."""
    runs = [run for run in section.runs if not run.settings.get("training.patience_steps")]
    warm_ups = [(run, run.warm_up) for run in runs if run.warm_up is not None and run.warm_up.stopped_early]
    found = [(run, warm_up) for run, warm_up in warm_ups if warm_up.steps < LEAST_WARM_UP]
    if found:
        least, most = (pick(warm_up.steps for _, warm_up in found) for pick in (min, max))
        epoch = max(warm_up.steps_per_epoch for _, warm_up in found)
        patience = min(int(run.settings["training.patience"]) for run, _ in found)
        yield (
            f"the backbone's warm-up was at its best after {least if least == most else f'{least} to {most}'} steps, "
            f"and early stopping ended it; with {epoch} steps an epoch, a patience of {patience} epochs may give up "
            "too soon: run with --set training.patience_steps=300 and compare."
        )
