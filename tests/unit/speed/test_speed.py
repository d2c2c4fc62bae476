"""The workload of `protofed speed`: every system computes the same, and what is told of it adds up."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from protofed.cli.speed import growth_table
from protofed.errors import ConfigError, MachineError
from protofed.privacy.upload import contributions
from protofed.slices.histories import BOS, PAD
from protofed.slices.windows import NO_TARGET
from protofed.speed.alone import update_alone
from protofed.speed.comparison import checked, ratios
from protofed.speed.measure import Figures, figures_of, flops_of_round, group_of, largest_difference, player
from protofed.speed.workload import (
    ITEMS,
    LEAST,
    MOST,
    PROMPT,
    STEPS,
    aggregate,
    first_library,
    made_up,
    made_up_events,
    update_together,
    uploads_of,
)

WIDTH, CLIENTS, COHORT = 16, 12, 6


def test_a_stack_ends_where_its_clients_end_alone():
    work = made_up(CLIENTS, COHORT, WIDTH)
    clients = work.cohort_of(0)
    before, v = work.first_prompts(clients), work.model.v
    together = update_together(work, clients, before, v)
    alone = torch.stack([update_alone(work, int(client), before[at], v) for at, client in enumerate(clients)])
    assert (together - alone).abs().max() < 1e-6
    assert (together - before).flatten(1).norm(dim=1).min() > 1e-3  # they have learned


def test_every_client_has_its_events_from_the_right_and_predicts_each_from_what_came_before():
    events = made_up_events(50)
    assert (int(events.lengths.min()), int(events.lengths.max())) == (LEAST, MOST)
    real = events.targets != NO_TARGET
    assert torch.equal(real.sum(1), events.lengths)
    assert torch.equal(events.tokens == PAD, ~real)
    first = MOST - events.lengths
    assert bool((events.tokens.gather(1, first[:, None]) == BOS).all())
    for tokens, targets, length in zip(events.tokens, events.targets, events.lengths.tolist(), strict=True):
        assert torch.equal(tokens[MOST - length + 1 :], targets[MOST - length : -1])
    assert 0 <= int(events.negatives.min()) <= int(events.negatives.max()) < ITEMS


def test_a_round_of_prototypes_is_the_running_average_of_what_was_sent():
    work = made_up(CLIENTS, COHORT, WIDTH)
    library = first_library(work)
    z, block = uploads_of(work, work.first_prompts(work.cohort_of(0)), library.v)
    rows, at = contributions(z, block, work.upload)
    sums = torch.zeros(work.upload.n_prototypes, rows.shape[1], dtype=torch.float64).index_add_(0, at, rows)
    expected = 0.9 * library.ema_sums.double() + 0.1 * sums[:, :-1]
    assert torch.allclose(aggregate(work, library, z, block).ema_sums.double(), expected, atol=1e-6)


def test_rounds_draw_their_clients_anew_and_the_same_again():
    work = made_up(1_000, 50, WIDTH)
    assert torch.equal(work.cohort_of(3), made_up(1_000, 50, WIDTH).cohort_of(3))
    assert not torch.equal(work.cohort_of(3), work.cohort_of(4))
    assert len(work.cohort_of(3).unique()) == 50


def test_flops_of_a_round_are_those_of_its_matrix_products():
    """A forward pass of a token costs 2 · 6 d² a layer, a backward one through frozen weights as much."""
    n, d = 3, WIDTH
    lengths = made_up_events(n).lengths
    tokens = n * (int(lengths.max()) + PROMPT)
    products = STEPS * 2 * tokens * 2 * 2 * 6 * d * d
    counted = flops_of_round(d, n)
    assert (
        products < counted < 6 * products
    )  # attention, scores and the pull come on top; at this width they weigh more


def told(v: float, n: int = 2) -> dict[str, object]:
    return {"v": [[v] * 3], "z": [[0.0] * 3] * n}


def test_the_largest_difference_is_over_all_systems_and_never_hides_what_cannot_be_compared():
    assert largest_difference({"a": told(1.0), "b": told(1.25), "c": told(0.5)}) == 0.5
    assert largest_difference({"a": told(1.0)}) == 0.0
    assert largest_difference({"a": told(1.0), "b": told(1.0, n=3)}) == float("inf")
    assert largest_difference({"a": told(1.0), "b": told(float("nan"))}) == float("inf")


def test_figures_are_medians_and_ratios_are_times_ours():
    def repeat(seconds: float) -> dict[str, object]:
        return {"rounds": 2, "seconds": seconds, "cpu_seconds": seconds / 2, "memory": int(seconds)}

    loop = figures_of("loop", 3.0, [repeat(each) for each in (8.0, 2.0, 40.0)], 64, 100, 10)
    assert (loop.seconds, loop.least, loop.most, loop.cpu_seconds, loop.memory) == (4.0, 1.0, 20.0, 2.0, 40)
    assert loop.updates == 2.5
    ours = Figures("stack", 64, 10, 100, 1, 1.0, 1.0, 1.0, 0.5, 1, 0.0)
    assert ratios(ours, [ours, loop]) == {"loop": {"seconds": 4.0, "cpu_seconds": 4.0, "target": None}}
    assert [group_of(each) for each in (0.001, 0.1, 30.0)] == [50, 20, 1]
    assert growth_table("", [{**vars_of(ours), "updates_per_second": 10.0}]).row_count == 1


def vars_of(figures: Figures) -> dict[str, object]:
    return {name: getattr(figures, name) for name in Figures.__dataclass_fields__}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"peers": "loop,tff"}, "--peers must be of loop, pfl and flower, got 'tff'"),
        ({"peers": "pfl"}, "--peers pfl needs --pfl PYTHON"),
        ({"pfl": Path("/no/python")}, "--pfl: no python at /no/python"),
        ({"device": "tpu"}, "--device must be cpu or cuda, got 'tpu'"),
        ({"device": "cuda"}, "--device cuda compares with the loop alone"),
        ({"cohort": 2_000}, "no more than --clients in a round, got 5, 2000 of 1000"),
        ({"widths": [30]}, "--width must be a multiple of 4, got 30"),
    ],
)
def test_what_cannot_be_played_is_one_line(given, message):
    asked = {"widths": [64], "peers": "loop,flower", "pfl": None, "clients": 1_000, "cohort": 50, "repeats": 5}
    with pytest.raises(ConfigError, match=message):
        checked(**{**asked, "device": "cpu", **given})


@pytest.mark.slow
def test_two_systems_in_processes_of_their_own_agree_and_leave_nothing_behind(tmp_path):
    import sys

    ended = {}
    for name in ("stack", "loop"):
        size = {"width": WIDTH, "clients": CLIENTS, "cohort": COHORT, "device": "cpu"}
        with player(name, Path(sys.executable), tmp_path, **size) as who:
            ended[name] = who.play(3)
        assert who.process.poll() is not None
    assert largest_difference(ended) < 1e-5
    assert np.array(ended["stack"]["z"]).shape == (COHORT, 64)
    assert all(one["seconds"] > 0 and one["memory"] > 10**7 for one in ended.values())
    assert json.loads(json.dumps(ended["loop"])) == ended["loop"]


@pytest.mark.slow
def test_a_system_that_ends_says_why(tmp_path):
    import sys

    with pytest.raises(MachineError, match="pfl ended before it had played its rounds"):  # noqa: SIM117
        with player("pfl", Path(sys.executable), tmp_path, width=WIDTH, clients=4, cohort=2, device="cpu") as who:
            who.play(1)
