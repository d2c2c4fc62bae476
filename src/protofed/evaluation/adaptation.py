"""How fast a method adapts to a slice: the first step at which it reaches 95 % of where it ends."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

BATCH = 256


@dataclass(frozen=True, slots=True)
class Trace:
    """NDCG@10 on the slice's validation part after so many optimiser steps, starting at step 0."""

    steps: Int[np.ndarray, " P"]  # ascending; local steps per active client where clients train on their own
    samples: Int[np.ndarray, " P"]  # training sequences processed so far, by everybody: the unit that compares methods
    values: Float[np.ndarray, " P"]


@dataclass(frozen=True, slots=True)
class Adaptation:
    """When a trace first reached its goal; a censored one never did, and `steps` and `samples` say how far it was seen.

    `start` and `converged` belong next to the steps wherever they are printed: who learns nothing needs 0 steps.
    """

    steps: int
    samples: int
    start: float
    converged: float
    censored: bool


@dataclass(frozen=True, slots=True)
class AdaptationSummary:
    """Medians over traces (infinite once half of them are censored) and the share that is censored."""

    steps: float
    samples: float
    start: float
    converged: float
    censored_fraction: float
    n_traces: int


def converged_value(values: Float[np.ndarray, " P"]) -> float:
    """The best value of an extended run (3 times the epochs, patience 5); NaN if there is none."""
    seen = values[~np.isnan(values)]
    return float(seen.max()) if len(seen) else float("nan")


def steps_to_fraction(trace: Trace, converged: float, *, fraction: float = 0.95) -> Adaptation:
    """The first point of the trace whose value is at least `fraction` of the converged value."""
    reached = np.flatnonzero(trace.values >= fraction * converged)
    at = int(reached[0]) if len(reached) else -1
    return Adaptation(
        steps=int(trace.steps[at]),
        samples=int(trace.samples[at]),
        start=float(trace.values[0]),
        converged=converged,
        censored=not len(reached),
    )


def aggregate(results: Sequence[Adaptation]) -> AdaptationSummary:
    """The medians over seeds (or slices); traces without a converged value (no validation queries) are left out."""
    kept = [result for result in results if not np.isnan(result.converged)]
    if not kept:
        nan = float("nan")
        return AdaptationSummary(nan, nan, nan, nan, nan, 0)
    return AdaptationSummary(
        steps=float(np.median([np.inf if r.censored else r.steps for r in kept])),
        samples=float(np.median([np.inf if r.censored else r.samples for r in kept])),
        start=float(np.median([r.start for r in kept])),
        converged=float(np.median([r.converged for r in kept])),
        censored_fraction=sum(r.censored for r in kept) / len(kept),
        n_traces=len(kept),
    )


def batch_equivalents(samples: int | float, *, batch: int = BATCH) -> float:
    """Samples as steps of one server with this batch size, to set clients beside centralised methods."""
    return samples / batch


def mean_local_steps(client_steps: int, active_clients: int) -> float:
    """Local steps of the average client that took part; NaN if none did."""
    return client_steps / active_clients if active_clients else float("nan")


def probe_steps(last: int, *, every: int = 10, log_spaced: bool = False) -> Int[np.ndarray, " P"]:
    """The steps after which to measure: 0, every, 2·every, ... or 0, 1, 2, 4, 8, ..., always ending with `last`."""
    between = 2 ** np.arange(last.bit_length()) if log_spaced else np.arange(every, last + 1, every)
    return np.unique(np.concatenate([[0], between, [last]]))
