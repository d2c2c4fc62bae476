"""Windows that share lines: every token once, nobody over the edge, and the losses of windows that stand alone."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from worlds import LENGTH, random_model, tiny_config, tiny_stream

from protofed.backbone.injection import visible, visible_on_lines
from protofed.backbone.losses import LOSSES, draw_negatives, last_states, states_at_sources, window_losses
from protofed.backbone.recorded import Inputs, RecordedSteps, Shape, columns, from_columns
from protofed.backbone.training import PlainDescent, Task, train
from protofed.seeds import stream
from protofed.slices.histories import PAD
from protofed.slices.lines import NOBODY, columns_of, first_fit, lengths_of, send_together, sharing_lines, worth_sharing
from protofed.slices.windows import NO_TARGET, Windows, moved, on_lines, take, training_windows, trimmed

SLICE = tiny_stream().slice_(0)  # where histories begin


def some_windows(n: int = 13) -> Windows:
    """Every other of the shortest windows of one to three targets."""
    rng = np.random.default_rng(0)
    windows = training_windows(SLICE.past, SLICE.train_positions, length=LENGTH, stride=3, rng=rng)
    return take(windows, lengths_of(windows.tokens).argsort(stable=True)[: 2 * n : 2])


def ragged(lengths: list[int], room: int) -> torch.Tensor:
    """Windows of so many tokens, all different, at the right end."""
    tokens = torch.full((len(lengths), room), PAD)
    for window, length in enumerate(lengths):
        tokens[window, room - length :] = 100 * window + torch.arange(length)
    return tokens


@given(st.lists(st.integers(0, 12), min_size=1, max_size=40))
def test_first_fit_overlaps_nowhere_and_leaves_at_most_one_line_half_empty(lengths):
    line, column = first_fit(lengths, 12)
    taken = np.zeros((max(line) + 1, 12), dtype=int)
    for k, first, length in zip(line, column, lengths, strict=True):
        assert first + length <= 12
        taken[k, first : first + length] += 1
    assert taken.max(initial=0) <= 1
    assert (taken.sum(1) * 2 <= 12).sum() <= 1  # two such lines would have been one


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.sampled_from([1, 4, 8]))
def test_every_token_stands_once_on_a_line_where_shift_says_and_remembers_its_place(lengths, multiple):
    tokens = ragged(lengths, 9)
    lines = sharing_lines(tokens, multiple)
    assert len(lines.tokens) % multiple == 0
    assert (lines.tokens != PAD).sum() == sum(lengths)
    assert torch.equal(lines.windows == NOBODY, lines.tokens == PAD)
    for window, length in enumerate(lengths):
        for place in range(9 - length, 9):
            at = lines.line[window], place + lines.shift[window]
            assert (lines.tokens[at], lines.windows[at], lines.places[at]) == (tokens[window, place], window, place)


def test_a_token_sees_what_it_would_see_alone():
    tokens = ragged([3, 1, 5, 2, 0, 4], 6)
    lines = sharing_lines(tokens)
    alone, together = visible(tokens, 0), visible_on_lines(lines.windows)
    real = tokens != PAD
    for window, line in enumerate(lines.line.tolist()):
        mine = real[window].nonzero()[:, 0]
        there = mine + lines.shift[window]
        assert torch.equal(alone[window][mine][:, mine], together[line][there][:, there])
        others = (lines.windows[line] != window).nonzero()[:, 0]
        assert not together[line][there][:, others].any()
    assert together.any(-1).all()


@pytest.mark.parametrize("loss", LOSSES)
def test_windows_on_lines_have_the_losses_and_gradients_of_windows_alone(loss):
    model = random_model(SLICE.n_train_items, history_length=LENGTH).requires_grad_(True)
    alone = some_windows()
    together = on_lines(alone)
    assert together.lines is not None
    assert len(together.lines.tokens) < len(alone)
    negatives = draw_negatives(len(alone), 9, SLICE.n_train_items, stream(0, "negatives"))
    found = []
    for windows in (alone, together):
        sums, counts = window_losses(model, windows, negatives, LOSSES[loss])
        found.append((sums, counts, torch.autograd.grad(sums.sum() / counts.sum(), list(model.parameters()))))
    assert torch.equal(found[0][1], found[1][1])
    assert torch.allclose(found[0][0], found[1][0], rtol=1e-5)
    for one, other in zip(found[0][2], found[1][2], strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_states_of_windows_on_lines_are_those_of_windows_alone():
    model = random_model(SLICE.n_train_items, history_length=LENGTH)
    alone = some_windows()
    together = on_lines(alone)
    real = alone.targets != NO_TARGET
    assert torch.allclose(last_states(model, together), model.last_hidden(alone.tokens), atol=1e-6)
    one, other = (states_at_sources(model, windows)[real] for windows in (together, alone))
    assert torch.allclose(one, other, atol=1e-6)


def test_a_given_prompt_or_table_is_read_window_by_window():
    model = random_model(SLICE.n_train_items, history_length=LENGTH)
    alone = some_windows()
    negatives = draw_negatives(len(alone), 9, SLICE.n_train_items, stream(0, "negatives"))
    prompt = torch.randn(len(alone), 3, model.config.width, generator=stream(0, "prompt"))
    for given_ in ({"prompt": prompt}, {"embed": lambda items: 2 * model.embed(items)}):
        one, other = (window_losses(model, w, negatives, LOSSES["softmax"], **given_) for w in (alone, on_lines(alone)))
        assert torch.equal(one[0], other[0])


def test_lines_are_dropped_where_windows_are_picked_and_kept_where_they_move():
    windows = on_lines(some_windows())
    assert take(windows, torch.arange(3)).lines is None
    assert trimmed(windows).lines is None
    kept = moved(windows, "cpu").lines
    assert kept is not None
    assert all(torch.equal(a, b) for a, b in zip(columns_of(kept), columns_of(windows.lines), strict=True))


def test_lines_sent_together_are_the_lines():
    parts = [sharing_lines(ragged(lengths, 7), 2) for lengths in ([3, 4, 1], [7, 7, 2, 2], [1])]
    for one, other in zip(parts, send_together(parts, torch.device("cpu")), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(columns_of(one), columns_of(other), strict=True))


def test_recorded_steps_read_windows_on_lines_in_a_few_shapes_and_lose_no_target():
    windows = some_windows(n=39)
    steps = RecordedSteps(lambda inputs: None, Shape(16, LENGTH, 6), torch.device("cpu"))
    laid = list(steps.laid(windows, 16, stream(0, "order"), share=True))
    assert len(laid) == 3
    assert {batch.targets.shape[1] for batch in laid} <= {3, 6}
    assert all(len(batch.lines.tokens) % 8 == 0 and len(batch.lines.line) == 16 for batch in laid)
    assert sum(int((batch.targets != NO_TARGET).sum()) for batch in laid) == int((windows.targets != NO_TARGET).sum())
    model = random_model(SLICE.n_train_items, history_length=LENGTH)
    negatives = torch.zeros(16, 1, dtype=torch.int64)
    for batch in laid:
        again = from_columns(columns(Inputs(batch, negatives)))
        one, other = (
            window_losses(model, w, negatives, LOSSES["softmax"])[0]
            for w in (again.batch, take(batch, torch.arange(16)))
        )
        assert torch.allclose(one, other, rtol=1e-5)


def test_sharing_pays_only_where_windows_are_short():
    assert worth_sharing(ragged([2, 3, 1, 9], 10))
    assert not worth_sharing(ragged([9, 10, 8, 3], 10))
    assert not worth_sharing(ragged([], 10))
    assert lengths_of(ragged([2, 0, 3], 5)).tolist() == [2, 0, 3]


def test_a_training_on_lines_ends_where_one_without_does(monkeypatch):
    """Without dropout, whose draws follow the layout."""
    config = tiny_config().training
    task = Task(SLICE, SLICE.train_positions, 2, 1e-3)
    first = random_model(SLICE.n_train_items, history_length=LENGTH)
    ends, shared = [], []
    for share in (True, False):
        monkeypatch.setattr("protofed.backbone.training.worth_sharing", lambda tokens, share=share: share)
        monkeypatch.setattr(
            "protofed.backbone.training.on_lines", lambda windows: shared.append(1) or on_lines(windows)
        )
        ends.append(train(first, task, config, seed=0, descend=PlainDescent())[0])
    assert shared
    for (name, one), other in zip(ends[0].named_parameters(), ends[1].parameters(), strict=True):
        # A key's bias moves all logits of a query alike: its gradient is rounding, and AdamW divides that by itself.
        assert torch.allclose(one, other, atol=2 * 1e-3 if name.endswith("key.bias") else 1e-5), name
