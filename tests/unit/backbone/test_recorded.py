"""Recorded steps: padding changes no loss and no gradient, and a replayed step is the step itself."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from worlds import LENGTH, random_model, tiny_config, tiny_stream, warmed_up

from protofed.backbone import training
from protofed.backbone.extras import Extra, Notes
from protofed.backbone.losses import LOSSES, draw_negatives, window_losses
from protofed.backbone.recorded import Inputs, RecordedSteps, Shape, columns, from_columns, pad_inputs, pad_windows
from protofed.backbone.training import PlainDescent, Task, train
from protofed.methods.baselines.buffer import replay
from protofed.methods.baselines.ccd import CCD
from protofed.methods.baselines.lwf import Lists, imitating
from protofed.methods.baselines.reloop import ReLoop
from protofed.methods.protocol import World
from protofed.seeds import stream
from protofed.slices.windows import NO_TARGET, batches, real_targets, take, training_windows, trimmed

SHAPE = Shape(windows=16, tokens=LENGTH, targets=8)
SLICE = tiny_stream().slice_(1)


def some_inputs(n: int = 11, prompt: torch.Tensor | None = None) -> Inputs:
    rng = np.random.default_rng(0)
    windows = training_windows(SLICE.past, SLICE.train_positions, length=LENGTH, stride=6, rng=rng)
    batch = trimmed(take(windows, torch.arange(n)))
    return Inputs(batch, draw_negatives(n, 9, SLICE.n_train_items, stream(0, "negatives")), prompt)


def test_what_was_added_has_no_target_and_what_was_there_keeps_its_place():
    given = some_inputs()
    full = pad_inputs(given, SHAPE)
    assert (full.batch.tokens.shape, full.batch.targets.shape) == ((16, LENGTH), (16, 8))
    assert real_targets(full.batch).tolist() == [*real_targets(given.batch).tolist(), 0, 0, 0, 0, 0]
    for w in range(11):
        for p in range(given.batch.targets.shape[1]):
            if given.batch.targets[w, p] != NO_TARGET:
                old, new = given.batch.sources[w, p], full.batch.sources[w, p]
                assert given.batch.tokens[w, old] == full.batch.tokens[w, new]
    same = from_columns(columns(full))
    assert torch.equal(same.batch.tokens, full.batch.tokens)
    assert torch.equal(same.negatives, full.negatives)


@pytest.mark.parametrize("prompted", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_padded_batch_has_the_losses_and_gradients_of_the_batch(loss, prompted):
    model = random_model(SLICE.n_train_items, history_length=LENGTH).requires_grad_(True)
    prompt = torch.randn(11, 3, model.config.width, generator=stream(0, "prompt")) if prompted else None
    gradients = []
    for inputs in (some_inputs(prompt=prompt), pad_inputs(some_inputs(prompt=prompt), SHAPE)):
        sums, counts = window_losses(model, inputs.batch, inputs.negatives, LOSSES[loss], inputs.prompt)
        assert torch.equal(counts, real_targets(inputs.batch))
        gradients.append((sums[:11], torch.autograd.grad(sums.sum() / counts.sum(), list(model.parameters()))))
    assert torch.allclose(gradients[0][0], gradients[1][0], rtol=1e-5)
    for plain, full in zip(gradients[0][1], gradients[1][1], strict=True):
        assert torch.allclose(plain, full, atol=1e-6)


def test_windows_laid_out_at_once_are_the_batches_in_the_given_shape():
    rng = np.random.default_rng(0)
    windows = training_windows(SLICE.past, SLICE.train_positions, length=LENGTH, stride=6, rng=rng)
    size, cpu = 16, torch.device("cpu")
    steps = RecordedSteps(lambda inputs: None, SHAPE, cpu)
    laid = list(steps.laid(windows, size, stream(0, "order")))
    one_by_one = [pad_windows(trimmed(b), SHAPE) for b in batches(windows, size, stream(0, "order"))]
    assert len(windows) % size
    assert len(laid) == len(one_by_one) > 2
    for here, there in zip(laid, one_by_one, strict=True):
        real = there.targets != NO_TARGET
        for name in ("users", "tokens", "targets", "newest"):
            assert torch.equal(getattr(here, name), getattr(there, name))
        assert torch.equal(here.sources[real], there.sources[real])


def extras() -> dict[str, Extra]:
    """Of every method that adds something to the loss of a window."""
    world = World(tiny_config(), tiny_stream().slice_(0), warmed_up()[0])
    teacher, rng = warmed_up()[0], stream(0, "extra")
    found = {
        "lwf": imitating(teacher, 0.5, 2.0, Lists(20, 3), rng, Notes()),
        "reloop": ReLoop()._correction(world, teacher, SLICE, Notes()),
        "replay": replay(world, SLICE, torch.arange(40), 0.7, rng, Notes()),
        "ccd": CCD()._imitation(world, teacher, SLICE),
    }
    return {name: extra for name, extra in found.items() if extra is not None}


@pytest.mark.parametrize("name", extras())
def test_windows_that_were_added_get_no_extra_loss_and_stay_out_of_the_notes(name):
    extra = extras()[name]
    model = random_model(SLICE.n_train_items, width=16, layers=1, history_length=LENGTH).requires_grad_(True)
    full = pad_inputs(some_inputs(), SHAPE)
    added = extra(model, full.batch)
    assert added[:11].abs().min() > 0
    assert added[11:].tolist() == [0.0] * 5
    added.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert all(np.isfinite(mean) for mean in extra.notes.means().values())


def test_a_whole_training_in_padded_steps_ends_where_one_in_trimmed_steps_does(monkeypatch):
    config = replace(tiny_config().training, batch_size=16)
    task = Task(SLICE, SLICE.train_positions, 2, 1e-3)
    first = random_model(SLICE.n_train_items, history_length=LENGTH)
    ends = [train(first, task, config, seed=0, descend=PlainDescent())[0]]
    plain = training.step_of

    def in_padded_steps(*about):
        step = plain(*about)
        shape = Shape(config.batch_size, LENGTH, config.stride)
        return lambda inputs: step(pad_inputs(inputs, shape))

    monkeypatch.setattr(training, "step_of", in_padded_steps)
    ends.append(train(first, task, config, seed=0, descend=PlainDescent())[0])
    for (name, one), other in zip(ends[0].named_parameters(), ends[1].parameters(), strict=True):
        # A key's bias moves all logits of a query alike: its gradient is rounding, and AdamW divides that by itself.
        assert torch.allclose(one, other, atol=2 * 1e-3 if name.endswith("key.bias") else 1e-6), name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("share", [False, True])
def test_replayed_steps_end_where_launched_ones_do(monkeypatch, share):
    monkeypatch.setattr(training, "worth_sharing", lambda tokens: share)
    config = replace(tiny_config().training, batch_size=16)
    task = Task(SLICE, SLICE.train_positions, 3, 1e-3, prompt_rate=0.5)
    first = random_model(SLICE.n_train_items, history_length=LENGTH).cuda()
    ends = [train(first, task, config, seed=0, descend=PlainDescent())[0]]
    monkeypatch.setattr("protofed.backbone.recorded.STEPS_AS_THEY_ARE", 10**9)
    ends.append(train(first, task, config, seed=0, descend=PlainDescent())[0])
    for one, other in zip(*(model.parameters() for model in ends), strict=True):
        assert torch.allclose(one, other, atol=1e-5)
