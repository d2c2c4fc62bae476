"""What is left of a run, by a clock that the test sets: what earlier stages took, and nothing where nobody can know."""

from collections.abc import Sequence

import pytest

from protofed.experiments.stages import CHECKING, PREPARING, WARM_UP, evaluating, learning, stages_of
from protofed.progress import Pace, Stage, within

TWO = stages_of(2)


def paced(*told: tuple[float, str, float, float | None], stages: Sequence[Stage] = TWO, before: int = 0) -> Pace:
    """The pace after all that was told, each at its time."""
    pace = Pace(stages=tuple(stages), before=before)
    for now, task, done, total in told:
        pace = pace.after(task, done, total, now)
    return pace


BASE = [(0, CHECKING, 0, 3), (2, WARM_UP, 0, 3), (40, PREPARING, 0, None), (45, evaluating(0, 2), 0, None)]
FIRST = [(50, learning(1, 2), 0, None), (70, evaluating(1, 2), 0, None)]


def test_the_stages_of_a_run_are_in_order_and_learning_and_evaluating_are_of_one_kind_each():
    assert [stage.name for stage in TWO] == [
        *("checking candidates", "warm-up", "preparing the method", "base block: evaluating"),
        *("slice 1 of 2: learning", "slice 1 of 2: evaluating", "slice 2 of 2: learning", "slice 2 of 2: evaluating"),
    ]
    assert [stage.kind for stage in TWO][3:] == ["evaluating", *(["learning", "evaluating"] * 2)]


def test_nothing_is_said_before_a_slice_has_been_learned():
    for n in range(len(BASE) + 1):
        assert paced(*BASE[:n]).left(46) is None
    assert paced(*BASE, FIRST[0]).left(60) is None  # slice 1 is being learned; slice 2 will be


def test_what_is_left_is_what_the_same_stages_of_earlier_slices_took():
    pace = paced(*BASE, *FIRST)  # evaluating took 5 s, learning 20 s; slice 1 is evaluated since 70
    assert pace.left(72) == pytest.approx(3 + 20 + 5)
    assert pace.left(80) == pytest.approx(0 + 20 + 5)  # longer than usual: what is left does not fall below the rest
    pace = pace.after(learning(2, 2), 0, None, 79)  # evaluating took 5 and 9 s
    assert pace.left(79) == pytest.approx(20 + 7)
    assert pace.left(89) == pytest.approx(10 + 7)
    pace = pace.after(evaluating(2, 2), 0, None, 99)
    assert pace.left(100) == pytest.approx(6)


def test_a_run_that_goes_on_after_a_slice_knows_nothing_until_it_has_learned_one():
    told = [(0, CHECKING, 0, 5), (3, PREPARING, 0, None), (5, learning(2, 4), 0, None), (15, evaluating(2, 4), 0, None)]
    assert paced(*told[:3], stages=stages_of(4)).left(6) is None
    pace = paced(*told, stages=stages_of(4))
    assert pace.left(16) is None  # no slice has been evaluated
    pace = pace.after(learning(3, 4), 0, None, 17)
    assert pace.left(17) == pytest.approx(10 + 2 + 10 + 2)


def test_the_share_of_a_run_is_counted_in_stages_and_never_falls_when_one_ends_early():
    told = [*BASE[:2], (5, WARM_UP, 1, 4), (9, WARM_UP, 2, 5), (13, WARM_UP, 3, 5), *BASE[2:], *FIRST]
    shares = [paced(*told[:n]).share() for n in range(len(told) + 1)]
    assert shares[:3] == [0, 0, 1 / 8]
    assert shares[5] == pytest.approx((1 + 3 / 5) / 8)
    assert shares[6] == 2 / 8  # the bar of the warm-up is full once the next stage begins
    assert shares == sorted(shares)
    assert shares[-1] == 5 / 8


def test_a_training_that_stops_early_expects_its_patience_after_its_best_epoch():
    """Three epochs of 4 s; each improves, so that the end moves on with it."""
    told = [(0, WARM_UP, 0, 3), (4, WARM_UP, 1, 4), (8, WARM_UP, 2, 5)]
    piece = paced(*told).piece
    assert piece.left(8) == pytest.approx(3 * 4)
    assert piece.left(10) == pytest.approx(3 * 4 - 2)
    assert piece.grew
    assert not paced(told[0]).piece.grew
    ended = paced(*told, (12, WARM_UP, 3, 5), (16, WARM_UP, 4, 5), (20, WARM_UP, 5, 5)).piece
    assert (ended.share(), ended.left(20)) == (1, 0)


def test_a_training_that_goes_on_after_a_kill_is_judged_by_its_own_epochs():
    assert paced((0, WARM_UP, 40, 43)).piece.left(0) is None
    assert paced((0, WARM_UP, 40, 43), (6, WARM_UP, 41, 43)).piece.left(6) == pytest.approx(12)


def test_the_next_piece_of_a_stage_starts_its_own_pace_and_the_stage_keeps_its_clock():
    stage = learning(1, 2)
    told = [*BASE, (50, stage, 0, None), (90, stage, 1, 10), (91, stage, 2, 10)]
    assert paced(*told).piece.left(91) == pytest.approx(8)  # what came before the first step is not counted
    pace = paced(*told, (100, stage, 1, 5))
    assert pace.piece.left(100) is None
    assert (pace.begun, pace.at) == (50, 4)


def test_work_outside_of_all_stages_has_a_pace_of_its_own():
    pace = paced((5, "reading log.csv", 0, 100), (7, "reading log.csv", 50, 100), stages=())
    assert (pace.left(8), pace.share(), pace.begun) == (None, 0, 5)
    assert pace.piece.left(8) == pytest.approx(1)


def test_of_several_methods_the_second_says_nothing_by_the_first_and_counts_from_where_it_ended():
    one = TWO
    both = [Stage(stage.name, f"{method}: {stage.kind}") for method in ("a", "b") for stage in one]
    pace = paced(stages=both, before=len(one))
    assert pace.share() == 1 / 2
    for now, task, done, total in [*BASE, *FIRST]:
        pace = pace.after(task, done, total, now)
    assert pace.share() == (8 + 5) / 16
    assert pace.left(70) == pytest.approx(5 + 20 + 5)
    first = paced(*BASE, *FIRST, stages=both)
    assert first.left(70) is None  # the second method is ahead


@pytest.mark.parametrize(("note", "said"), [("epoch 3", "epoch 3"), ("", "codec")])
def test_a_piece_of_a_stage_is_told_under_the_name_of_the_stage(note, said):
    told = []
    within(lambda *given: told.append(given), "preparing")("codec", 1, 2, note)
    assert told == [("preparing", 1, 2, said)]
