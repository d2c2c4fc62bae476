"""Training: what it may touch, what it reproduces, when it stops, and that it learns."""

import copy
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Generator, Tensor
from worlds import LENGTH, shuffled_after, tiny_config, tiny_log, tiny_stream, warmed_up

from protofed.backbone import training
from protofed.backbone.losses import LOSSES, draw_negatives, window_losses
from protofed.backbone.new_items import only_rows
from protofed.backbone.sasrec import SASRec
from protofed.backbone.training import PlainDescent, Task, best_of, epoch_windows, random_prompt, train
from protofed.backbone.validation import validation_ndcg
from protofed.seeds import numpy_stream, stream
from protofed.slices.candidates import NO_CANDIDATE
from protofed.slices.stream import SliceStream
from protofed.slices.windows import NO_TARGET, training_windows

CONFIG = tiny_config(backbone__dropout=0.2)


def fresh(seed: int = 0) -> SASRec:
    base = tiny_stream().slice_(0)
    return SASRec(CONFIG.backbone, base.n_train_items, stream(seed, "fresh")).eval()


def base_task(epochs: int = 2, learning_rate: float = 5e-3, prompt_rate: float = 0.5) -> Task:
    base = tiny_stream().slice_(0)
    return Task(base, base.train_positions, epochs, learning_rate, prompt_rate)


def trained(model: SASRec, task: Task, seed: int = 0, **options):
    return train(model, task, options.pop("config", CONFIG.training), seed=seed, descend=PlainDescent(), **options)


def same_weights(one: SASRec, other: SASRec) -> bool:
    return all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in one.state_dict().items())


def test_the_same_seed_gives_the_same_weights_whatever_the_global_generator_says():
    with torch.random.fork_rng([]):
        torch.manual_seed(1)
        one, fit_one = trained(fresh(), base_task())
        torch.manual_seed(2)
        again, fit_again = trained(fresh(), base_task())
    other, _ = trained(fresh(), base_task(), seed=1)
    assert same_weights(one, again)
    assert fit_one == fit_again
    assert not same_weights(one, other)


def test_training_leaves_the_global_generator_and_the_given_model_alone():
    model = fresh()
    before, state = copy.deepcopy(model), torch.get_rng_state()
    result, _ = trained(model, base_task())
    assert torch.equal(torch.get_rng_state(), state)
    assert same_weights(model, before)
    assert not same_weights(model, result)
    assert not result.training
    assert not any(parameter.requires_grad for parameter in result.parameters())


@pytest.fixture
def scripted(monkeypatch):
    """Lets a test say what each epoch's validation value will be; gives back the weights seen at each."""

    def script(values: list[float]) -> list[dict[str, Tensor]]:
        seen: list[dict[str, Tensor]] = []

        def validation(model, exam) -> float:
            seen.append(copy.deepcopy(model.state_dict()))
            return values[len(seen) - 1]

        monkeypatch.setattr(training, "mean_grade", validation)
        return seen

    return script


@pytest.mark.parametrize(
    ("values", "best", "length"),
    [
        ([0.1, 0.2, 0.5, 0.4, 0.4, 0.9], 2, 5),  # two epochs without a better one are enough
        ([0.1, 0.2, 0.2, 0.2, 0.9], 1, 4),  # the first of equals
        ([0.5, 0.1, 0.1, 0.9], 0, 3),  # the model as it came
        ([0.1, 0.2, 0.3], 2, 3),  # the cap comes first
        ([float("nan")] * 4, 3, 4),  # nothing to select by: the last epoch
    ],
)
def test_early_stopping_restores_the_weights_of_the_best_epoch(scripted, values, best, length):
    seen = scripted(values)
    config = replace(CONFIG.training, patience=2)
    model, fit = trained(fresh(), base_task(epochs=len(values) - 1), config=config)
    assert fit.trace == pytest.approx(values[:length], nan_ok=True)
    assert fit.best_epoch == best == best_of(fit.trace)
    assert all(torch.equal(tensor, seen[best][name]) for name, tensor in model.state_dict().items())
    assert all(not torch.equal(seen[i]["items"], seen[i + 1]["items"]) for i in range(length - 1))


@pytest.mark.parametrize(
    ("patience", "steps", "length"),
    [
        (1, 0.0, 3),  # epochs alone
        (1, 1.0, 3),  # as many steps as an epoch has
        (1, 2.5, 5),  # two and a half epochs of steps: three epochs pass
        (4, 2.5, 6),  # both hold: the longer one
        (1, 99.0, 9),  # the cap comes first
    ],
)
def test_patience_waits_for_its_epochs_and_for_its_steps(scripted, patience, steps, length):
    _, whole = trained(fresh(), base_task(epochs=1))
    scripted([0.1, 0.5, *[0.4] * 8])
    waits = replace(CONFIG.training, patience=patience, patience_steps=int(steps * whole.steps_per_epoch))
    told = []
    _, fit = trained(fresh(), base_task(epochs=8), config=waits, progress=lambda *said: told.append(said[1:3]))
    assert (fit.best_epoch, len(fit.trace)) == (1, length)
    assert told[-1] == (length - 1, length - 1)  # the last epoch was expected to be the last


def test_a_hopeless_learning_rate_leaves_the_model_as_it_came():
    model, _ = warmed_up()
    result, fit = trained(model, base_task(epochs=4, learning_rate=1e6))
    assert fit.best_epoch == 0
    assert max(fit.trace[1:]) < fit.trace[0]
    assert same_weights(result, model)


def test_training_some_rows_moves_nothing_else(scripted):
    scripted([0.1, 0.2, 0.3, 0.4])
    model, _ = warmed_up()
    chosen = torch.zeros(model.n_rows, dtype=torch.bool)
    chosen[[3, 17, 40]] = True
    config = replace(CONFIG.training, weight_decay=0.5)
    result, _ = trained(model, base_task(epochs=3, learning_rate=0.05), config=config, trainable=only_rows(chosen))
    old, new = model.state_dict(), result.state_dict()
    assert torch.equal(old["items"][~chosen], new["items"][~chosen])
    assert all(torch.equal(old[name], new[name]) for name in old if name not in ("items", "mean_row"))
    assert (old["items"][chosen] != new["items"][chosen]).all()
    assert torch.equal(new["mean_row"], new["items"].mean(0))


class Spy:
    """A plain descent that keeps what it was handed."""

    def __init__(self) -> None:
        self.newest, self.targets = -1, Counter()

    def __call__(self, losses, batch, optimiser) -> None:
        self.newest = max(self.newest, int(batch.newest.max()))
        self.targets.update(batch.targets[batch.targets != NO_TARGET].tolist())
        PlainDescent()(losses, batch, optimiser)


@pytest.mark.parametrize("index", [0, 1])
def test_every_train_event_is_a_target_once_an_epoch_and_no_later_event_ever(index):
    data = tiny_stream()
    slice_, bounds = data.slice_(index), data.bounds[index]
    spy = Spy()
    model = SASRec(CONFIG.backbone, slice_.n_train_items, stream(0, "fresh"))
    task = Task(slice_, slice_.train_positions, 2, 1e-3)
    _, fit = train(model, task, CONFIG.training, seed=0, descend=spy)
    items = data.log.items[bounds.start : bounds.train_end].tolist()
    assert spy.targets == Counter(items * 2)
    assert fit.newest_target == spy.newest == bounds.train_end - 1


def test_windows_do_not_depend_on_how_many_users_come_after_the_train_cut():
    log, length = tiny_log(), 4  # short, so that some targets need a second pass
    more = SliceStream(shuffled_after(log, tiny_stream().bounds[1].train_end, newcomers=20), CONFIG.stream)
    assert more.slice_(1).past.n_users > tiny_stream().slice_(1).past.n_users
    cut = []
    for data in (tiny_stream(), more):
        slice_ = data.slice_(1)
        rng = numpy_stream(0, "test")
        cut.append(training_windows(slice_.past, slice_.all_train_positions, length=length, stride=3, rng=rng))
    for column in ("users", "tokens", "sources", "targets", "newest"):
        assert torch.equal(getattr(cut[0], column), getattr(cut[1], column)), column


def mean_loss(model: SASRec) -> float:
    windows = epoch_windows(model, base_task(), CONFIG.training, 99, 0)
    negatives = draw_negatives(len(windows), 32, model.n_rows, Generator().manual_seed(5))
    with torch.no_grad():
        sums, counts = window_losses(model, windows, negatives, LOSSES["softmax"])
    return float(sums.sum() / counts.sum())


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_learns_to_rank_the_validation_part(loss):
    config = replace(CONFIG.training, loss=loss)
    _, fit = trained(fresh(), base_task(epochs=8, learning_rate=1e-2, prompt_rate=0.0), config=config)
    assert max(fit.trace) > 1.6 * fit.trace[0]


def test_the_warm_up_lowers_the_loss_and_beats_the_untrained_model():
    model, fit = warmed_up()
    assert mean_loss(model) < mean_loss(fresh()) - 0.3
    base = tiny_stream().slice_(0)
    assert validation_ndcg(model, base) == max(fit.trace)
    assert max(fit.trace) > fit.trace[0] + 0.1


def test_validation_ndcg_ranks_each_positive_among_its_candidates():
    model, _ = warmed_up()
    slice_ = tiny_stream().slice_(0)
    values = []
    for row in range(len(slice_.validation)):
        tokens = slice_.queries(np.array([row]), LENGTH).tokens
        rivals = [n for n in slice_.validation.negatives[row].tolist() if n != NO_CANDIDATE]
        with torch.no_grad():
            scores = model.scores(model.hidden(tokens)[:, -1], slice_.validation.n_items)[0].tolist()
        own = scores[int(slice_.validation.positives[row])]
        rank = 1 + sum(scores[item] >= own for item in rivals)
        values.append(1 / np.log2(rank + 1) if rank <= 10 else 0.0)
    assert validation_ndcg(model, slice_) == pytest.approx(np.mean(values), abs=2e-3)  # rounding may swap a near-tie


def test_a_random_prompt_has_the_length_of_an_input_token_and_comes_at_the_asked_rate():
    model, _ = warmed_up()
    rng = Generator().manual_seed(0)
    known = model.has_row.nonzero()[:, 0]
    prompts = [random_prompt(model, 3, 0.25, rng, known) for _ in range(400)]
    given = [prompt for prompt in prompts if prompt is not None]
    assert len(given) / 400 == pytest.approx(0.25, abs=0.06)
    assert given[0].shape == (3, model.config.prompt_length, model.config.width)
    assert given[0].norm(dim=-1).flatten().tolist() == pytest.approx([model.input_norm().item()] * 6, rel=1e-5)
    assert not torch.equal(given[0], given[1])


def test_without_prompts_no_draw_is_spent_on_them():
    rng = Generator().manual_seed(0)
    state = rng.get_state()
    assert random_prompt(warmed_up()[0], 3, 0.0, rng, torch.arange(2)) is None
    assert torch.equal(rng.get_state(), state)


def test_the_plain_descent_steps_along_the_mean_over_targets_with_a_clipped_gradient():
    weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    optimiser = torch.optim.SGD([weight], lr=1.0)

    def losses(batch) -> tuple[Tensor, Tensor]:
        return torch.stack([weight[0] * 6, weight[1] * 8]), torch.tensor([1, 1])  # mean gradient (3, 4), length 5

    batch = epoch_windows(fresh(), base_task(), CONFIG.training, 0, 0)
    PlainDescent(max_grad_norm=1.0)(losses, batch, optimiser)
    assert weight.tolist() == pytest.approx([3 - 0.6, 4 - 0.8])
    PlainDescent(max_grad_norm=100.0)(losses, batch, optimiser)
    assert weight.tolist() == pytest.approx([2.4 - 3, 3.2 - 4])
