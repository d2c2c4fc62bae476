"""What log.jsonl tells is read as the last word on each slice, and only where it is about the method."""

import math

import pytest

from protofed.report.runs import Run, Told, read_journal
from protofed.report.slices import traces

LINES = """{"slice": 0, "stage": "warm-up", "epochs": 3, "validation_ndcg10": [0.1]}
{"slice": 0, "stage": "learn", "bytes_up": 999}
{"slice": 2, "stage": "learn", "bytes_up": 30, "steps_per_epoch": 7, "validation_ndcg10": [0.2, 0.4]}
{"slice": 1, "stage": "learn", "bytes_up": 1}
{"slice": 1, "stage": "learn", "bytes_up": 10, "bytes_down": true}
{"slice": 3, "stage": "lea"""


def run_that(*told: Told) -> Run:
    return Run("run", "", {"seed": 0}, {}, {}, {}, journal=told)


def test_the_last_word_on_a_slice_counts_and_the_base_block_does_not() -> None:
    journal = read_journal(LINES)
    assert [record["slice"] for record in journal] == [1, 2]
    assert run_that(*journal).told("bytes_up") == 20.0
    assert math.isnan(run_that(*journal).told("bytes_down"))
    assert read_journal("") == ()


def test_a_trace_has_a_point_before_the_first_epoch_and_after_each() -> None:
    (trace,) = traces(run_that({"slice": 2, "steps_per_epoch": 7, "validation_ndcg10": [0.2, 0.4, 0.3]})).values()
    assert trace.steps.tolist() == [0, 7, 14]
    assert trace.samples.tolist() == [0, 448, 896]
    assert trace.values == pytest.approx([0.2, 0.4, 0.3])


def test_a_trace_of_new_rows_beside_training_clients_is_not_the_methods() -> None:
    told = {"steps_per_epoch": 7, "validation_ndcg10": [0.2]}
    journal = [{"slice": 1, "active_clients": 5, **told}, {"slice": 2, "validation_ndcg10": []}, {"slice": 3, **told}]
    assert list(traces(run_that(*journal))) == [3]
