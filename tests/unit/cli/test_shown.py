"""What is shown of a run: lines where nobody looks at a terminal, bars where somebody does."""

import io

import pytest
from rich.console import Console

from protofed.cli.progress import Drawn, Lines, clock, draw, duration, shown, still
from protofed.experiments.stages import stages_of
from protofed.progress import RUN


def printed(*told) -> list[str]:
    """The lines of a file that stderr is."""
    file = io.StringIO()
    with shown(Console(file=file, width=40)) as progress:
        assert isinstance(progress, Lines)
        progress.expect("method on log", stages_of(2))
        for given in told:
            progress(*given)
    return file.getvalue().splitlines()


def test_a_file_gets_a_line_for_each_stage_that_begins_and_each_slice_that_is_done():
    assert printed(
        (RUN, 0, 3),
        ("checking candidates", 0, 3),
        ("checking candidates", 1, 3),
        ("warm-up", 0, 3, "at most 100 epochs"),
        ("warm-up", 1, 4, "epoch 1 of at most 100, validation NDCG@10 0.1"),
        (RUN, 1, 3, "slice 0 done"),
        ("slice 1 of 2: learning", 0, None),
        ("slice 1 of 2: learning", 1, 2, "epoch 1 of at most 30"),
    ) == ["checking candidates", "warm-up (at most 100 epochs)", "slice 0 done (1 of 3)", "slice 1 of 2: learning"]


def test_a_file_gets_nothing_before_a_run_begins():
    assert printed(("loading PyTorch", 0, None), ("reading gowalla", 0, None)) == []


def picture(*told) -> list[str]:
    """The bars after all that was told, as text."""
    drawn = Drawn(0.0)
    drawn.expect("ewc on yelp", stages_of(2))
    for given in told:
        drawn(*given)
    file = io.StringIO()
    Console(file=file, width=100).print(draw(drawn))
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_a_terminal_shows_the_run_the_stage_and_what_it_says(monkeypatch):
    times = iter([2.0, 6.0, 10.0, 11.0])
    monkeypatch.setattr("protofed.cli.progress.time.monotonic", lambda: next(times))
    told = [("warm-up", 0, 3, "at most 9 epochs"), ("warm-up", 1, 4, "epoch 1"), ("warm-up", 2, 5, "epoch 2")]
    overall, stage, note = picture((RUN, 0, 3), *told)
    assert overall.split()[:3] == ["ewc", "on", "yelp"]
    assert overall.endswith("0:11")
    assert stage.startswith("warm-up ")
    assert stage.endswith("0:09  at least 11 s left")
    assert note == "epoch 2"
    assert stage.count("━") == 9  # two fifths of 24: without colours only what is done is drawn


def test_a_long_note_is_cut_and_never_wrapped():
    assert len(picture(("warm-up", 1, 3, "word " * 50))) == 3


@pytest.mark.parametrize(
    ("seconds", "said"), [(None, ""), (0.4, ""), (12.2, "about 12 s left"), (300, "about 5 min left")]
)
def test_what_is_left_is_said_in_words_or_not_at_all(seconds, said):
    assert still(seconds) == said


@pytest.mark.parametrize(("seconds", "said"), [(7.9, "0:07"), (750, "12:30"), (3_723, "1:02:03"), (36_000, "10:00:00")])
def test_a_running_clock(seconds, said):
    assert clock(seconds) == said


@pytest.mark.parametrize(("seconds", "said"), [(89, "89 s"), (90, "2 min"), (5_399, "90 min"), (7_200, "2.0 h")])
def test_a_duration_is_one_number_that_people_read(seconds, said):
    assert duration(seconds) == said
