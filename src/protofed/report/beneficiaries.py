"""Who benefits: each user's gain of ProtoFed-SP over another row, tested, and the gains of groups."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import pyarrow as pa
from jaxtyping import Float, Int
from numpy.random import default_rng

from protofed.evaluation.significance import bootstrap_difference
from protofed.evaluation.strata import MIN_QUERIES, TERTILES, benjamini_hochberg, sign_flip_p, tertiles
from protofed.methods.names import FROZEN, OURS
from protofed.report.intervals import Pair, asked, pair
from protofed.report.layout import Drawing, Missing, Part
from protofed.report.runs import Run
from protofed.report.sections import Row, Section, slug
from protofed.report.tables import Results
from protofed.report.variants import common_runs, compared, flagship
from protofed.seeds import seed_of

TITLE = "Who benefits"
LEVEL = 0.05
EXACT_UP_TO = 16  # blocks of queries: 32,768 sign patterns, as the first sign may stay
CELLS = 1 << 22
Runs = tuple[Sequence[Run], Sequence[Run]]  # ours and the other row's, with the same seeds
KINDS = ("new_user", "returning", "new_item", "known_item", "repeat", "novel")
DRIFT = Missing(
    "Gains by drift",
    "per_user.parquet of these runs has no column drift; runs of this version do, so run again to see it",
)


@dataclass(frozen=True, slots=True)
class Gains:
    """Users with enough queries to test: mean gain per query, p-value, and p after Benjamini and Hochberg."""

    gain: Float[np.ndarray, " U"]
    p: Float[np.ndarray, " U"]
    adjusted: Float[np.ndarray, " U"]
    blocks: Int[np.ndarray, " U"]


def benefits(results: Results) -> tuple[Part | Missing, ...]:
    """The first ProtoFed-SP row against the best row of another method, and against the frozen backbone."""
    ours, others = flagship(results.section), rivals(results)
    if ours is None or not others:
        return (Missing(TITLE, f"it takes a {OURS} row and a row of another method"),)
    parts = [_against(results.section, ours, other) for other in others]
    drifts = (rows.drift() for row in (ours, *others) for rows in asked(row.runs))
    silent = any(isinstance(part, Part) for part in parts) and all(drift is None for drift in drifts)
    return (*parts, DRIFT) if silent else (*parts,)


def rivals(results: Results) -> tuple[Row, ...]:
    """The best row of another method and the frozen one, without repeats."""
    others = results.ranked([row for row in compared(results.section) if not row.is_ours])
    return tuple(others[:1] + [row for row in others[1:] if row.method == FROZEN][:1])


def _against(section: Section, ours: Row, other: Row) -> Part | Missing:
    title = f"{TITLE}: {ours.label} against {other.label}"
    runs = common_runs(ours, other)
    whole = pair(*runs)
    if whole is None:
        return Missing(title, "the two rows share no seed, or did not keep the same users and queries")
    name = f"{section.slug}-benefits-{slug(other.label)}"
    drawings = [_dots(f"{name}-groups", groups_of(runs, whole))]
    gains = user_gains(whole, pair(*runs, ("sampled", "novel", "ndcg@10"), whole.users), seed=0)
    if len(gains.p):
        drawings.insert(0, _volcano(f"{name}-volcano", gains))
    seeds = ", ".join(str(run.seed) for run in runs[0])
    averaged = f"seeds {seeds} averaged first" if len(runs[0]) > 1 else f"seed {seeds}"
    return Part(name, title, _note(gains, len(whole.users), averaged), drawings=tuple(drawings))


def user_gains(whole: Pair, novel: Pair | None, *, seed: int) -> Gains:
    """Every user with at least 6 blocks of queries, tested by flipping the signs of whole blocks.

    per_user.parquet keeps sums and not single queries: a block is what a user was asked in one slice, novel events and
    repeats apart. Queries of a block flip together, which costs power and never invents evidence.
    """
    differences, counts = whole.ours.sums - whole.other.sums, whole.counts
    if novel is not None:
        of_novel, n_novel = novel.ours.sums - novel.other.sums, novel.counts
        rest = np.where(counts > n_novel, differences - of_novel, 0.0)
        differences, counts = np.concatenate([of_novel, rest], 1), np.concatenate([n_novel, counts - n_novel], 1)
    n_blocks = (counts > 0).sum(1)
    tested = n_blocks >= MIN_QUERIES
    rows = [row[n > 0] for row, n in zip(differences[tested], counts[tested], strict=True)]
    p = block_p(rows, seed=seed)
    gain = differences[tested].sum(1) / counts[tested].sum(1)
    return Gains(gain, p, benjamini_hochberg(p), n_blocks[tested])


def block_p(rows: Sequence[Float[np.ndarray, " _"]], *, seed: int) -> Float[np.ndarray, " U"]:
    """The two-sided sign-flip p-value of each row; up to 16 blocks all sign patterns count, equal sizes at once."""
    p = np.full(len(rows), np.nan)
    sizes = np.array([len(row) for row in rows], dtype=np.int64)
    for n in np.unique(sizes).tolist():
        members = np.flatnonzero(sizes == n).tolist()
        if n > EXACT_UP_TO:
            p[members] = [sign_flip_p(rows[u], default_rng(seed_of(seed, "sign-flip", u))) for u in members]
            continue
        signs = np.array([(1.0, *rest) for rest in product((-1.0, 1.0), repeat=n - 1)])  # (2^(n-1), n)
        for part in np.array_split(members, 1 + len(members) * len(signs) // CELLS):
            stack = np.array([rows[u] for u in part.tolist()]).reshape(len(part), n)
            bar = np.abs(stack.sum(1)) - 1e-9 * np.abs(stack).sum(1)
            p[part] = (np.abs(signs @ stack.T) >= bar).mean(0)
    return p


def groups_of(runs: Runs, whole: Pair) -> list[tuple[str, Pair]]:
    """Each group's name and tables: everybody, thirds by activity and by drift, kinds of events; those with queries."""
    n_asked = whole.counts.sum(1)
    groups = [("everybody", whole)]
    for name, values in (("activity", n_asked.astype(np.float64)), ("drift", mean_drift(runs, whole.users))):
        third = tertiles(values, n_asked > 0)
        codes = reversed([*enumerate(TERTILES)])
        groups += [(f"{name}: {label} third", whole.of(third == code)) for code, label in codes]
    kinds = [(kind.replace("_", " "), pair(*runs, ("sampled", kind, "ndcg@10"))) for kind in KINDS]
    groups += [(label, found) for label, found in kinds if found]
    return [(label, found) for label, found in groups if found.counts.any()]


def mean_drift(runs: Runs, users: pa.Array) -> Float[np.ndarray, " U"]:
    """How far each user moved per slice 1..T in which that is known; NaN without any. The first run that tells counts.

    Drift follows from the log alone, so all runs on the same queries tell the same.
    """
    drifts = (rows.drift() for own in runs for rows in asked(own))
    told = next((drift for drift in drifts if drift is not None), None)
    if told is None:
        return np.full(len(users), np.nan)
    told = told.later()
    slices = range(1, 1 + int(told.columns["slice_tested"].max(initial=0)))
    n = (told.by_user("n", users, slices) > 0).sum(1)
    return np.where(n > 0, told.by_user("drift", users, slices).sum(1) / np.maximum(n, 1), np.nan)


def _dots(name: str, groups: Sequence[tuple[str, Pair]]) -> Drawing:
    rows = []
    for label, found in groups:
        n_users = int(found.counts.any(1).sum())
        gap = bootstrap_difference(found.ours, found.other, default_rng(seed_of(0, "report", name, label)))
        rows.append((label, gap.mean, gap.low, gap.high, n_users, int(found.counts.sum()), gap.p_value))
    header = ("group", "gain", "low95", "high95", "users", "queries", "p_value")
    caption = "Gain by group (users), 95 % interval over users"
    return Drawing(name, caption, "dots", header, tuple(rows), "gain in NDCG@10", from_zero=True)


def _volcano(name: str, gains: Gains) -> Drawing:
    columns = (gains.gain, gains.p, gains.adjusted, gains.blocks)
    order = np.lexsort((gains.gain, gains.p))
    rows = tuple(tuple(column[place].item() for column in columns) for place in order)
    caption = f"Each user's gain against the evidence for it; line: p = {LEVEL:g} uncorrected"
    header = ("gain", "p_value", "p_adjusted", "blocks")
    return Drawing(name, caption, "users", header, rows, "gain in NDCG@10 per query", "-log10 p")


def _note(gains: Gains, n_users: int, averaged: str) -> str:
    found = gains.adjusted <= LEVEL
    up, down = int((found & (gains.gain > 0)).sum()), int((found & (gains.gain <= 0)).sum())
    tested = (
        f"{len(gains.p):,} of {n_users:,} users have the {MIN_QUERIES} blocks of queries that a test needs (a block: a "
        "user's novel or repeated events of one slice; per_user.parquet keeps no single queries); after Benjamini and "
        f"Hochberg at {LEVEL:g}, {up:,} gain (green) and {down:,} lose (red). "
    )
    return (
        f"NDCG@10, sampled candidates, {averaged}. {tested}Groups are dots with intervals and not a "
        "radar, whose area depends on the order of its axes and which has no room for intervals. Activity is counted "
        "in test queries over all slices; a user can be new in one slice and returning in the next. Drift is how far "
        "the items of a slice lie from those before, by who else met them, mean over slices; the log alone decides it, "
        "and users with few events seem to drift more."
    )
