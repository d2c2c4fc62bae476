"""The log is cut between instants, as near to the wanted shares as ties allow, or refused with a way out."""

import re
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from small_logs import DAY, log_of, random_log

from protofed.config import StreamConfig, override, parse_override
from protofed.data.interactions import InteractionLog
from protofed.errors import ConfigError, DataError
from protofed.slices.partition import PARTS, SliceBounds, cut_between_instants, partition
from protofed.slices.stream import SliceStream

OPTIONS = [(edges, base) for edges in ("count", "duration") for base in ("block", "slice-1")]


def edges_of(bounds: tuple[SliceBounds, ...]) -> list[int]:
    """All edges between parts and slices, the log's own ends left out."""
    return sorted({edge for b in bounds for edge in (b.start, b.train_end, b.val_end, b.end)})[1:-1]


def log_of_times(times: list[int] | np.ndarray, name: str = "toy") -> InteractionLog:
    return log_of([(row % 5, row % 11, int(time)) for row, time in enumerate(times)], name)


def days(n_days: int, per_day: int) -> InteractionLog:
    return log_of_times([day * DAY for day in range(n_days) for _ in range(per_day)], name="days")


def cuts_by_hand(times: list[int], targets: list[float], min_instants: int) -> list[int]:
    """Left to right, the nearest allowed cut: enough instants since the last cut, enough left for the cuts to come."""
    cuts: list[int] = []
    for done, target in enumerate(targets):
        to_come = len(targets) - done
        allowed = [
            cut
            for cut in range(1, len(times))
            if times[cut - 1] != times[cut]
            and len(set(times[cuts[-1] if cuts else 0 : cut])) >= min_instants
            and len(set(times[cut:])) >= min_instants * to_come
        ]
        cuts.append(min(allowed, key=lambda cut: abs(cut - target)))
    return cuts


@pytest.mark.parametrize(("edges", "base"), OPTIONS)
@pytest.mark.parametrize("seed", range(5))
def test_every_event_lies_in_exactly_one_part_of_one_slice(seed, edges, base):
    log = random_log(seed)
    bounds = partition(log, n_slices=5, edges=edges, base=base)
    covered = Counter(position for b in bounds for part in PARTS for position in range(*b.part(part)))
    assert covered == Counter(range(len(log)))
    assert [b.index for b in bounds] == list(range(6 if base == "block" else 5))


@pytest.mark.parametrize(("edges", "base"), OPTIONS)
@pytest.mark.parametrize("seed", range(5))
def test_no_instant_is_split_between_two_parts_and_none_is_empty(seed, edges, base):
    log = random_log(seed)
    times = log.times.tolist()
    bounds = partition(log, n_slices=6, edges=edges, base=base)
    assert all(times[edge - 1] < times[edge] for edge in edges_of(bounds))
    assert all(len(range(*b.part(part))) > 0 for b in bounds for part in PARTS)


def test_a_log_without_ties_is_cut_at_the_exact_shares():
    bounds = partition(log_of_times(np.arange(1600)), n_slices=8)
    assert [(b.start, b.end) for b in bounds] == [(0, 800), *((800 + 100 * k, 900 + 100 * k) for k in range(8))]
    assert [(b.train_end - b.start, b.val_end - b.start) for b in bounds] == [(640, 720)] + [(80, 90)] * 8


def test_the_parts_follow_the_fractions_asked_for():
    bounds = partition(
        log_of_times(np.arange(1000)), n_slices=1, base_fraction=0.8, validation_fraction=0.2, test_fraction=0.3
    )
    assert bounds == (SliceBounds(0, 0, 400, 560, 800), SliceBounds(1, 800, 900, 940, 1000))


@pytest.mark.parametrize("seed", range(5))
def test_with_ties_each_edge_stays_within_half_an_instant_of_its_target(seed):
    times = np.sort(np.random.default_rng(seed).integers(0, 500, 2000))
    largest = max(Counter(times.tolist()).values())
    bounds = partition(log_of_times(times), n_slices=8)
    for index, b in enumerate(bounds[1:]):
        assert abs(b.start - (1000 + 125 * index)) <= largest / 2
    for b in bounds:
        assert abs(b.train_end - (b.start + 0.8 * (b.end - b.start))) <= largest / 2
        assert abs(b.val_end - (b.start + 0.9 * (b.end - b.start))) <= largest / 2


def test_a_single_cut_is_the_nearest_gap_between_instants():
    rng = np.random.default_rng(7)
    for _ in range(200):
        times = np.sort(rng.integers(0, 9, 25))
        gaps = [cut for cut in range(1, 25) if times[cut - 1] != times[cut]]
        if not gaps:
            continue
        target = float(rng.uniform(0, 25))
        (cut,) = cut_between_instants(times, np.array([target]), min_instants=1)
        assert cut in gaps
        assert abs(cut - target) == min(abs(gap - target) for gap in gaps)


def test_several_cuts_leave_enough_instants_between_them_and_are_nearest_among_those_that_do():
    rng = np.random.default_rng(8)
    for _ in range(100):
        min_instants, n_cuts = int(rng.integers(1, 4)), int(rng.integers(1, 5))
        n_instants = min_instants * (n_cuts + 1) + int(rng.integers(0, 6))
        times = np.repeat(np.arange(n_instants), rng.integers(1, 6, n_instants))
        targets = np.sort(rng.uniform(0, len(times), n_cuts))
        cuts = cut_between_instants(times, targets, min_instants=min_instants)
        assert cuts.tolist() == cuts_by_hand(times.tolist(), targets.tolist(), min_instants)
        assert all(len(set(part.tolist())) >= min_instants for part in np.split(times, cuts))


def test_slices_of_equal_duration_are_equally_long_on_a_log_that_grows():
    times = np.repeat(np.arange(200), np.arange(1, 201))  # the n-th hour has n events
    log = log_of_times(times)
    bounds = partition(log, n_slices=4, edges="duration")
    firsts = [int(times[b.start]) for b in bounds[1:]]
    assert firsts[0] == times[round(len(times) / 2)]
    expected = [firsts[0] + (199 - firsts[0]) * k / 4 for k in range(4)]
    assert all(0 <= found - wanted < 1 for found, wanted in zip(firsts, expected, strict=True))
    sizes = [b.end - b.start for b in bounds[1:]]
    assert sizes == sorted(sizes)
    assert sizes[-1] > 1.2 * sizes[0]


def test_slice_one_as_the_base_gives_equally_full_slices_of_the_whole_log():
    bounds = partition(log_of_times(np.arange(800)), n_slices=8, base="slice-1")
    assert [(b.index, b.start, b.end) for b in bounds] == [(k, 100 * k, 100 * (k + 1)) for k in range(8)]


def test_slice_one_as_the_base_is_as_long_as_the_others_where_slices_are_equally_long():
    times = np.repeat(np.arange(80), np.arange(1, 81))
    bounds = partition(log_of_times(times), n_slices=4, base="slice-1", edges="duration")
    assert [int(times[b.start]) for b in bounds] == [0, 20, 40, 60]


def test_a_log_of_seven_days_is_refused_for_eight_slices_and_runs_with_one():
    log = days(7, 50)
    with pytest.raises(DataError, match=r"^days has 7 distinct timestamps.*\(27 needed\).*stream\.n_slices=1$") as told:
        SliceStream(log)
    assert "\n" not in str(told.value)
    bounds = SliceStream(log, StreamConfig(n_slices=1)).bounds
    assert bounds == (SliceBounds(0, 0, 50, 100, 150), SliceBounds(1, 150, 250, 300, 350))


@pytest.mark.parametrize(("edges", "base"), OPTIONS)
@pytest.mark.parametrize("n_days", [6, 7, 8, 9, 14, 15, 23, 29])
def test_the_way_out_that_a_refusal_names_works_and_is_the_most_there_is(n_days, edges, base):
    log = days(n_days, 4)
    config = StreamConfig(n_slices=12, edges=edges, base=base)
    with pytest.raises(DataError, match=f"{n_days} distinct timestamps") as told:
        SliceStream(log, config)
    advised = re.search(r"--set (stream\.n_slices=(\d+))", str(told.value))
    assert advised is not None
    key, value = parse_override(advised[1])
    stream = SliceStream(log, override(config, {key.removeprefix("stream."): value}))
    assert stream.n_slices == int(advised[2]) - (base == "slice-1")
    assert stream.n_slices >= 1
    with pytest.raises(DataError, match="too few"):
        partition(log, n_slices=int(advised[2]) + 1, edges=edges, base=base)


@pytest.mark.parametrize(("edges", "base"), OPTIONS)
@pytest.mark.parametrize("n_days", [1, 2, 5])
def test_a_log_with_fewer_than_six_instants_cannot_be_sliced_and_no_false_way_out_is_named(n_days, edges, base):
    with pytest.raises(DataError, match=f"has {n_days} distinct timestamps.*cannot be sliced"):
        partition(days(n_days, 9), edges=edges, base=base)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_slices": 0}, "n_slices must be at least 1, got 0"),
        ({"n_slices": -3}, "n_slices must be at least 1, got -3"),
        ({"n_slices": 1, "base": "slice-1"}, "n_slices must be at least 2.*slice-1.*got 1"),
        ({"base_fraction": 0.0}, r"base_fraction must lie strictly between 0 and 1, got 0\.0"),
        ({"base_fraction": 1.0, "edges": "duration"}, r"base_fraction must lie strictly between 0 and 1, got 1\.0"),
    ],
)
def test_settings_that_leave_no_slice_or_no_base_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        partition(days(100, 2), **options)


def test_the_edges_of_neighbouring_slices_meet():
    bounds = partition(random_log(3), n_slices=7)
    assert all(left.end == right.start for left, right in pairwise(bounds))
    assert (bounds[0].start, bounds[-1].end) == (0, 240)
