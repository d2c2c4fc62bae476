"""Steps to 95 %: traces worked out by hand."""

import math

import numpy as np
import pytest

from protofed.evaluation.adaptation import (
    Adaptation,
    Trace,
    aggregate,
    batch_equivalents,
    converged_value,
    mean_local_steps,
    probe_steps,
    steps_to_fraction,
)


def trace(*values: float) -> Trace:
    steps = 10 * np.arange(len(values))
    return Trace(steps, steps * 256, np.array(values))


def reached(steps: int) -> Adaptation:
    return Adaptation(steps, steps * 256, start=0.1, converged=0.5, censored=False)


CENSORED = Adaptation(30, 30 * 256, start=0.1, converged=0.5, censored=True)


def test_the_first_crossing_counts_even_if_the_trace_falls_back():
    found = steps_to_fraction(trace(0.1, 0.4, 0.48, 0.45, 0.5), converged=0.5)
    assert found == Adaptation(20, 20 * 256, start=0.1, converged=0.5, censored=False)


def test_a_value_of_exactly_95_percent_is_enough():
    assert steps_to_fraction(trace(0.0, 0.95), converged=1.0).steps == 10


def test_who_starts_there_needs_no_steps():
    found = steps_to_fraction(trace(0.5, 0.5), converged=0.5)
    assert (found.steps, found.samples, found.censored) == (0, 0, False)


def test_a_trace_that_never_gets_there_is_censored_at_its_end():
    found = steps_to_fraction(trace(0.1, 0.2, 0.3), converged=0.5)
    assert (found.steps, found.samples, found.censored) == (20, 20 * 256, True)


def test_a_nan_in_the_trace_is_not_a_crossing():
    found = steps_to_fraction(trace(0.1, math.nan, 0.5), converged=0.5)
    assert (found.steps, found.censored) == (20, False)


def test_the_converged_value_is_the_best_of_the_extended_run():
    assert converged_value(np.array([0.1, math.nan, 0.6, 0.5])) == 0.6
    assert math.isnan(converged_value(np.array([math.nan])))


def test_seeds_are_summarised_by_their_median():
    summary = aggregate([reached(10), reached(200), reached(20)])
    assert (summary.steps, summary.samples, summary.censored_fraction) == (20, 20 * 256, 0)
    assert (summary.start, summary.converged, summary.n_traces) == (0.1, 0.5, 3)


def test_a_censored_seed_is_slower_than_any_other():
    summary = aggregate([CENSORED, reached(40), reached(10)])
    assert (summary.steps, summary.censored_fraction) == (40, pytest.approx(1 / 3))
    assert aggregate([CENSORED, CENSORED, reached(10)]).steps == math.inf


def test_traces_without_validation_queries_are_left_out():
    unknown = Adaptation(0, 0, start=math.nan, converged=math.nan, censored=True)
    summary = aggregate([unknown, reached(10)])
    assert (summary.steps, summary.censored_fraction, summary.n_traces) == (10, 0, 1)
    assert math.isnan(aggregate([unknown]).steps)


def test_samples_convert_to_steps_of_a_full_batch():
    assert batch_equivalents(1024) == 4
    assert mean_local_steps(12, 8) == 1.5
    assert math.isnan(mean_local_steps(0, 0))


def test_probes_begin_at_zero_and_end_with_the_last_step():
    assert probe_steps(35).tolist() == [0, 10, 20, 30, 35]
    assert probe_steps(30).tolist() == [0, 10, 20, 30]
    assert probe_steps(20, log_spaced=True).tolist() == [0, 1, 2, 4, 8, 16, 20]
    assert probe_steps(0).tolist() == [0]
