"""EWC, SI, MAS, LwF and the reservoir against Avalanche: equal where the definitions are, else off by a known factor.

Small problems in float64, so that only a difference in the mathematics can show; docs/fidelity.md has the figures.
"""

import copy
import itertools
import sys
from collections import Counter, deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from agreement import apart, exactly
from stand_ins import standing_in
from torch import Generator, Tensor, nn
from torch.utils.data import TensorDataset
from worlds import random_model, tiny_config, tiny_stream, warmed_up

from protofed.backbone.extras import Notes
from protofed.backbone.sasrec import SASRec
from protofed.backbone.training import PlainDescent
from protofed.methods.baselines.buffer import reservoir
from protofed.methods.baselines.ewc import EWC, choice_probabilities, diagonal_fisher, joint_anchor, log_likelihood
from protofed.methods.baselines.importance import (
    Examples,
    Springs,
    draw_examples,
    drawing_back,
    mean_gradient_sizes,
    scale_to_mean_one,
    weights_of,
    zeros_of,
)
from protofed.methods.baselines.lwf import divergence
from protofed.methods.baselines.mas import MAS, sensitivity
from protofed.methods.baselines.synaptic_intelligence import EarningDescent, consolidate
from protofed.methods.protocol import World
from protofed.slices.histories import BOS, PAD
from protofed.slices.windows import Windows

with standing_in():
    pytest.importorskip("avalanche", reason="needs Avalanche: pip install --no-deps avalanche-lib==0.6.0 dill")
    from avalanche.benchmarks import benchmark_from_datasets
    from avalanche.benchmarks.utils import _make_taskaware_classification_dataset
    from avalanche.training.plugins import EvaluationPlugin, EWCPlugin, MASPlugin, SynapticIntelligencePlugin
    from avalanche.training.regularization import LearningWithoutForgetting
    from avalanche.training.storage_policy import ReservoirSamplingBuffer
    from avalanche.training.supervised import Naive

pytestmark = [  # what Avalanche 0.6.0 does with NumPy 2 and where a table grows
    pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Using a non-tuple sequence:UserWarning"),
]
LENGTH, CHOICES, ITEMS, SLICES, EVENTS = 6, 4, 9, 3, 6
RATE = 0.01
FREE = PlainDescent(1e9)  # Avalanche does not clip gradients
EXACT = 1e-10


class Ranker(nn.Module):
    """A backbone as Avalanche wants a model: a history and its candidates side by side go in, logits come out."""

    def __init__(self, model: SASRec, output: str = "logits") -> None:
        super().__init__()
        self.model, self.output = model, output

    def forward(self, x: Tensor) -> Tensor:
        length = self.model.config.history_length
        tokens, candidates = x[:, :length], x[:, length:]
        hidden = self.model.last_hidden(tokens)
        return hidden if self.output == "hidden" else (self.model.embed(candidates) @ hidden[..., None])[..., 0]

    def train(self, mode: bool = True) -> "Ranker":
        return super().train(False)  # Avalanche measures MAS with dropout on, we do not


def some_examples(seed: int, n: int = EVENTS) -> Examples:
    """Histories of all lengths, and candidates of which the first is what was met."""
    rng = Generator().manual_seed(seed)
    tokens = torch.randint(ITEMS, (n, LENGTH), generator=rng)
    starts = torch.arange(n) % LENGTH
    tokens = tokens.masked_fill(torch.arange(LENGTH) < starts[:, None], PAD).scatter(1, starts[:, None], BOS)
    candidates = torch.stack([torch.randperm(ITEMS, generator=rng)[:CHOICES] for _ in range(n)])
    return Examples(tokens, candidates, 0)


def slices() -> list[Examples]:
    return [some_examples(seed) for seed in range(SLICES)]


def inputs(examples: Examples) -> Tensor:
    return torch.cat([examples.tokens, examples.candidates], dim=1)


def labelled(examples: Examples, chosen: Tensor | None = None):
    """The examples as a data set of Avalanche's; the right answer is the first candidate unless others are chosen."""
    chosen = torch.zeros(len(examples), dtype=torch.int64) if chosen is None else chosen
    data = TensorDataset(inputs(examples), chosen)
    data.targets = chosen.tolist()
    return _make_taskaware_classification_dataset(data)


def optimiser_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=RATE, eps=1e-4)  # large enough not to blow up rounding errors


def plain(values: dict) -> dict[str, Tensor]:
    """Avalanche's numbers by our names."""
    return {name.removeprefix("model."): value.data.detach().clone() for name, value in values.items()}


def trained_by(plugin, batch: int):
    """Avalanche's own training loop over the slices, one after another; the weights after each."""
    model, optimiser = begun()
    quiet = SimpleNamespace(log_metrics=lambda metrics: None)
    strategy = Naive(
        model=Ranker(model),
        optimizer=optimiser,
        criterion=nn.CrossEntropyLoss(),
        train_mb_size=batch,
        train_epochs=1,
        plugins=[plugin],
        evaluator=lambda: EvaluationPlugin(loggers=[quiet]),
        device="cpu",
    )
    for experience in benchmark_from_datasets(train=[labelled(examples) for examples in slices()]).train_stream:
        strategy.train(experience, shuffle=False)
        yield weights_of(model)


def descended(optimiser, model: SASRec, examples: Examples, batch: int, descend=FREE, extra=None, after=None) -> None:
    """Our steps over one slice, in Avalanche's order: the mean loss of each batch, and something added to it."""
    x = inputs(examples)

    def losses(windows: Windows) -> tuple[Tensor, Tensor]:
        sums = -Ranker(model)(x[windows.users]).log_softmax(-1)[:, 0]
        return (sums if extra is None else sums + extra(model, windows)), torch.ones_like(windows.users)

    for rows in torch.arange(len(x)).split(batch):
        one = torch.zeros(len(rows), 1, dtype=torch.int64)
        descend(losses, Windows(rows, x[rows, :LENGTH], one, one, rows), optimiser)
        if after:
            after()


def begun() -> tuple[SASRec, torch.optim.Optimizer]:
    model = random_model(ITEMS)
    return model, optimiser_of(model)


def importances(plugin: EWCPlugin, model: SASRec, examples: Examples, batch: int, chosen: Tensor | None = None):
    ranker = Ranker(copy.deepcopy(model).requires_grad_(True))
    data, criterion = labelled(examples, chosen), nn.CrossEntropyLoss()
    return plugin.compute_importances(ranker, criterion, optimiser_of(ranker), data, "cpu", batch)


@exactly
@pytest.mark.parametrize("labels", ["true", "sample"])
def test_the_fisher_is_avalanches_importance_at_batch_size_1(labels, same):
    model, examples = random_model(ITEMS), some_examples(0, 24)
    rng = Generator().manual_seed(3)
    found = diagonal_fisher(model, examples, labels, rng)
    drawn = torch.multinomial(choice_probabilities(model, examples), 1, generator=rng.manual_seed(3))[:, 0]
    chosen = drawn if labels == "sample" else None
    same(found, plain(importances(EWCPlugin(1.0), model, examples, 1, chosen)))


@exactly
def test_avalanches_importance_is_the_fisher_over_the_batch_size_where_labels_follow_the_model(same):
    """The mean of a batch is squared there; gradients of drawn labels have mean 0, so their cross terms vanish."""
    model, one, size = random_model(ITEMS), some_examples(0, 1), 2
    chances = choice_probabilities(model, one)[0]
    copies = Examples(one.tokens.expand(size, -1), one.candidates.expand(size, -1), 0)
    expected = zeros_of(model)
    for labels in itertools.product(range(CHOICES), repeat=size):
        chosen = torch.tensor(labels)
        for name, value in plain(importances(EWCPlugin(1.0), model, copies, size, chosen)).items():
            expected[name] += chances[chosen].prod() * value
    fisher = zeros_of(model)
    for choice, chance in enumerate(chances):
        for name, value in mean_gradient_sizes(
            model, one, torch.tensor([choice]), log_likelihood, torch.square
        ).items():
            fisher[name] += chance * value
    same({name: value / size for name, value in fisher.items()}, expected)


@exactly
def test_our_strength_is_twice_avalanches_lambda(same):
    """Its penalty has no 1/2; the loss is 0 before, and the batch of ours has one target."""
    model, anchor = random_model(ITEMS), weights_of(random_model(ITEMS, seed=1))
    fisher = diagonal_fisher(model, some_examples(0), "true", Generator())
    plugin, ranker = EWCPlugin(0.75, mode="online", decay_factor=1.0), Ranker(model)
    for kept, ours in ((plugin.saved_params, anchor), (plugin.importances, fisher)):
        kept[0] = {f"model.{name}": SimpleNamespace(expand=tensor.expand) for name, tensor in ours.items()}
    strategy = SimpleNamespace(clock=SimpleNamespace(train_exp_counter=1), model=ranker, device="cpu", loss=0.0)
    plugin.before_backward(strategy)
    zero = torch.zeros(1, 1, dtype=torch.int64)
    strength = 2 * 0.75
    penalty = drawing_back(Springs(strength / 2, anchor, fisher))(model, Windows(zero[0], zero, zero, zero, zero[0]))
    same({"penalty": penalty.sum()}, {"penalty": strategy.loss}, 1e-6)  # Avalanche adds up in float32
    slopes = [torch.autograd.grad(total, list(model.parameters())) for total in (penalty.sum(), strategy.loss)]
    same(*({str(place): slope for place, slope in enumerate(found)} for found in slopes))


@exactly
@pytest.mark.parametrize(("mode", "decay"), [("online", 1.0), ("online", 0.4), ("separate", 1.0)])
def test_three_slices_of_ewc_end_at_avalanches_weights(mode, decay, same):
    plugin = EWCPlugin(0.5, mode, decay if mode == "online" else None)
    (model, optimiser), strength = begun(), 2 * 0.5
    anchor, total, notes = weights_of(model), zeros_of(model), Notes()
    for examples, expected in zip(slices(), trained_by(plugin, 1), strict=True):
        descended(optimiser, model, examples, 1, extra=drawing_back(Springs(strength / 2, anchor, total, notes)))
        same(weights_of(model), expected)
        added, old = diagonal_fisher(model, examples, "true", Generator()), {n: decay * t for n, t in total.items()}
        newest = weights_of(model)
        anchor = joint_anchor(anchor, old, newest, added) if mode == "separate" else newest
        total = {name: old[name] + added[name] for name in added}
    assert notes.mean("penalty") > 1e-5  # the springs did something


def tiny_world() -> World:
    return World(tiny_config(), tiny_stream().slice_(0), warmed_up()[0])


def after_two_slices(method, world: World):
    """The method's states after the base block and after slice 1, which has more items, each with its slice."""
    before, slice_ = method.start(world), tiny_stream().slice_(1)
    after, _ = method.learn(world, before, slice_, PlainDescent())
    assert after.backbone.n_rows > before.backbone.n_rows
    return [(before, world.base), (after, slice_)]


@pytest.mark.parametrize(
    ("method", "factor"), [(EWC(strength=3.0, examples=4), 1.5), (MAS(strength=3.0, examples=4), 3.0)]
)
def test_the_methods_put_that_factor_before_their_penalty(method, factor, monkeypatch):
    class Found(Exception):
        """What the method multiplies its quadratic form by."""

    def found(world, state, slice_, descend, strength):
        raise Found(strength)

    world = tiny_world()
    state = method.start(world)
    monkeypatch.setattr(sys.modules[type(method).__module__], "drawn_back", found)
    with pytest.raises(Found) as caught:
        method.learn(world, state, tiny_stream().slice_(1), PlainDescent())
    assert caught.value.args == (factor,)


def scaled(values: dict) -> dict:
    """Avalanche's importances with ours put in: each slice's have mean 1."""
    _, mean = scale_to_mean_one(plain(values))
    for value in values.values():
        value.data /= mean
    return values


def test_the_methods_own_fisher_is_avalanches_online_sum_of_fishers_of_mean_1(same):
    world, method = tiny_world(), EWC(labels="true", decay=0.5, examples=32, negatives=9)
    plugin = EWCPlugin(1.0, "online", method.decay)
    for place, (state, slice_) in enumerate(after_two_slices(method, world)):
        examples = draw_examples(world, slice_, method.examples, method.negatives, "ewc")
        plugin.update_importances(scaled(importances(plugin, state.backbone, examples, 1)), place)
        same(state.importance, plain(plugin.importances[place]), 1e-4)  # float32


def measured_by(plugin: MASPlugin, model: SASRec, examples: Examples, batch: int, *, output="logits", place=0) -> dict:
    """The plugin's importances after one more slice."""
    ranker = Ranker(copy.deepcopy(model).requires_grad_(True), output)
    plugin.after_training_exp(
        SimpleNamespace(
            model=ranker,
            optimizer=optimiser_of(ranker),
            experience=SimpleNamespace(dataset=labelled(examples)),
            clock=SimpleNamespace(train_exp_counter=place),
            train_mb_size=batch,
            device="cpu",
        )
    )
    return plain(plugin.importance)


@exactly
@pytest.mark.parametrize("output", ["logits", "hidden"])
def test_the_sensitivity_is_avalanches_importance_at_batch_size_1(output, same):
    model, examples = random_model(ITEMS), some_examples(0, 24)
    found = sensitivity(model, examples, output)
    same(found, measured_by(MASPlugin(), model, examples, 1, output=output))


@exactly
def test_avalanche_takes_the_size_of_a_batchs_mean_gradient_which_is_never_more(same):
    model, examples = random_model(ITEMS), some_examples(0, 24)
    ours, theirs = sensitivity(model, examples, "logits"), measured_by(MASPlugin(), model, examples, 8)
    assert all((theirs[name] <= ours[name] + 1e-9).all() for name in ours)
    assert 1.1 < sum(float(t.sum()) for t in ours.values()) / sum(float(t.sum()) for t in theirs.values()) < 8
    twice = Examples(examples.tokens.repeat_interleave(2, 0), examples.candidates.repeat_interleave(2, 0), 0)
    same(ours, measured_by(MASPlugin(), model, twice, 2))  # equal gradients have the size of their mean


@exactly
def test_three_slices_of_mas_end_at_avalanches_weights(same):
    """Both penalties are strength * sum of importance * move^2; `average` is Avalanche's alpha of 1/2."""
    (model, optimiser), strength = begun(), 0.02
    anchor, total, notes = weights_of(model), zeros_of(model), Notes()
    for place, (examples, expected) in enumerate(zip(slices(), trained_by(MASPlugin(strength, 0.5), 1), strict=True)):
        descended(optimiser, model, examples, 1, extra=drawing_back(Springs(strength, anchor, total, notes)))
        same(weights_of(model), expected)
        anchor, added = weights_of(model), sensitivity(model, examples, "logits")
        total = {name: (total[name] + value) / 2 if place else value for name, value in added.items()}
    assert notes.mean("penalty") > 1e-5


class ScaledMAS(MASPlugin):
    """Avalanche's plugin with ours put in: each slice's importances have mean 1."""

    def _get_importance(self, strategy):
        return scaled(super()._get_importance(strategy))


def test_the_methods_own_average_is_avalanches_alpha_of_a_half(same):
    world, method = tiny_world(), MAS(accumulate="average", examples=32, candidates=10)
    plugin = ScaledMAS(1.0, 0.5)
    for place, (state, slice_) in enumerate(after_two_slices(method, world)):
        expected = measured_by(plugin, state.backbone, method._unlabelled(world, slice_), 1, place=place)
        same(state.importance, expected, 1e-4)  # float32


@pytest.fixture
def copied_weights(monkeypatch):
    """Avalanche's SI reads weights as copies, as it does from a GPU; on a CPU it reads views of the live weights."""
    read = SynapticIntelligencePlugin.extract_weights

    def copy_of(model: nn.Module, target: dict, excluded: set[str]) -> None:
        read(model, target, excluded)
        for value in target.values():
            value.data = value.data.clone()

    monkeypatch.setattr(SynapticIntelligencePlugin, "extract_weights", staticmethod(copy_of))


as_on_a_gpu = pytest.mark.usefixtures("copied_weights")


@exactly
def test_on_a_cpu_avalanches_si_as_it_is_never_sees_a_weight_move():
    """Why the tests below make its reading of weights a copy; the day this fails, they need not any more."""
    plugin = SynapticIntelligencePlugin(1e6, eps=1e-3)
    *_, held = trained_by(plugin, 2)
    *_, free = trained_by(SynapticIntelligencePlugin(0.0, eps=1e-3), 2)
    assert all((value == 0).all() for value in plain(plugin.syn_data["cum_trajectory"]).values())
    assert apart(held, free) == 0  # a million times nothing holds nothing


def watching(model: SASRec, strength: float, anchor: dict, importance: dict) -> EarningDescent:
    return EarningDescent(FREE, Springs(strength, anchor, importance), zeros_of(model), deque())


def flat_like(model: SASRec, values: dict) -> dict[str, Tensor]:
    """Avalanche's flat vectors in the shapes of our weights."""
    return {name: value.reshape(dict(model.named_parameters())[name].shape) for name, value in plain(values).items()}


def after_a_run_up(plugin: SynapticIntelligencePlugin):
    """Avalanche and we after slice 0, of which nothing counts.

    Adam coasts from here, so that some weights earn less than nothing; from a standing start hardly any would.
    """
    run, (model, optimiser) = trained_by(plugin, 2), begun()
    next(run)
    descended(optimiser, model, slices()[0], 2)
    for value in (*plugin.syn_data["cum_trajectory"].values(), *plugin.ewc_data[1].values()):
        value.data.zero_()
    return run, model, optimiser


def earned_by(plugin: SynapticIntelligencePlugin, model: SASRec) -> dict[str, Tensor]:
    """Avalanche's importances before it cuts them."""
    return {name: -value for name, value in flat_like(model, plugin.syn_data["cum_trajectory"]).items()}


@exactly
@as_on_a_gpu
def test_what_a_weight_earns_is_minus_avalanches_trajectory_and_gives_its_importance(same):
    damping, plugin = 1e-3, SynapticIntelligencePlugin(0.0, eps=1e-3)
    run, model, optimiser = after_a_run_up(plugin)
    start, watch = weights_of(model), watching(model, 0.0, {}, {})
    descended(optimiser, model, slices()[1], 2, watch)
    same(weights_of(model), next(run))
    same({n: -earned for n, earned in watch.earned.items()}, flat_like(model, plugin.syn_data["trajectory"]))
    found = consolidate(zeros_of(model), watch.earned, start, weights_of(model), damping)
    same(found, {name: value.clamp(min=0) for name, value in earned_by(plugin, model).items()})


@exactly
@as_on_a_gpu
def test_avalanche_cuts_importances_from_above_and_we_from_below():
    plugin = SynapticIntelligencePlugin(0.0, eps=1e-3)
    run, model, _ = after_a_run_up(plugin)
    next(run)
    kept, uncut = flat_like(model, plugin.ewc_data[1]), earned_by(plugin, model)
    assert all(torch.equal(kept[name], value.clamp(max=1e-3)) for name, value in uncut.items())
    every = torch.cat([value.flatten() for value in uncut.values()])
    assert 0.01 < float((every < 0).double().mean()) < 0.5  # live on there and are cut here
    assert float((every > 1e-3).double().mean()) > 0.5  # are cut there and live on here


@exactly
@as_on_a_gpu
def test_under_a_penalty_si_follows_avalanches_path_and_leaves_the_penaltys_work_out(same):
    """Its lambda / 2 is our strength; it counts the gradient of the penalty as learning."""
    strength, damping = 400.0, 1e-3
    plugin = SynapticIntelligencePlugin([0.0, 0.0, 2 * strength], eps=damping)
    run, model, optimiser = after_a_run_up(plugin)
    descended(optimiser, model, slices()[1], 2)
    same(weights_of(model), next(run))
    held, uncut, anchor = flat_like(model, plugin.ewc_data[1]), earned_by(plugin, model), weights_of(model)
    work, before = zeros_of(model), [anchor]

    def count_work() -> None:
        now = weights_of(model)
        for name, was in before[-1].items():
            work[name] += 2 * strength * held[name] * (was - anchor[name]) * (now[name] - was)
        before.append(now)

    watch = watching(model, strength, anchor, held)
    descended(optimiser, model, slices()[2], 2, watch, after=count_work)
    same(weights_of(model), next(run))
    path = flat_like(model, plugin.syn_data["trajectory"])
    same({name: work[name] - earned for name, earned in watch.earned.items()}, path)
    assert apart({name: -earned for name, earned in watch.earned.items()}, path) > 1e-3  # what is left out matters
    # With the work counted, the sums of two slices agree wherever ours was not cut to 0 after the first.
    counted, old = {n: -value for n, value in path.items()}, {n: value.clamp(min=0) for n, value in uncut.items()}
    ours, theirs = consolidate(old, counted, anchor, weights_of(model), damping), earned_by(plugin, model)
    same(
        *({n: v.clamp(min=0)[uncut[n] >= 0] for n, v in one.items() if (uncut[n] >= 0).any()} for one in (ours, theirs))
    )


def distilled(teacher: Tensor, student: Tensor, units: list[int], temperature: float) -> Tensor:
    """Avalanche's loss of one batch, teacher and student being given by their logits."""
    lwf = LearningWithoutForgetting(alpha=1.0, temperature=temperature)
    lwf.prev_model = lambda x: teacher
    lwf.prev_classes_by_task[0] = set(units)
    return lwf(None, student, None)


def two_lists() -> tuple[Tensor, Tensor, list[int], Tensor]:
    rng = Generator().manual_seed(0)
    teacher, student = 3 * torch.randn(5, 7, generator=rng) + 1, torch.randn(5, 7, generator=rng).requires_grad_(True)
    units = [0, 2, 3, 6]
    real = torch.zeros(5, 7, dtype=torch.bool)
    real[:, units] = True
    return teacher, student, units, real


@exactly
@pytest.mark.parametrize("temperature", [1.0, 2.0, 5.0])
def test_distillation_is_temperature_squared_times_avalanches_where_the_teachers_spread_is_1(temperature, same):
    teacher, student, units, real = two_lists()
    known = teacher[:, units]
    teacher = teacher / known.std(1, correction=0, keepdim=True)
    ours = divergence(teacher, student, real, temperature).mean()
    theirs = temperature**2 * distilled(teacher, student, units, temperature)
    same({"loss": ours}, {"loss": theirs})
    same(*({"student": torch.autograd.grad(loss, student)[0]} for loss in (ours, theirs)))


@exactly
def test_elsewhere_the_teachers_spread_multiplies_avalanches_temperature(same):
    teacher, student, units, real = two_lists()
    spread = teacher[:, units].std(1, correction=0)
    assert float(spread.max() / spread.min()) > 1.3
    rows = [
        2.0**2 * distilled(teacher[[row]], student[[row]], units, 2.0 * float(spread[row]))
        for row in range(len(teacher))
    ]
    same({"loss": divergence(teacher, student, real, 2.0)}, {"loss": torch.stack(rows)})


def kept_by_avalanche(parts: list[list[int]], capacity: int) -> tuple[int, ...]:
    buffer = ReservoirSamplingBuffer(capacity)
    for part in parts:
        events = torch.tensor(part)
        data = TensorDataset(events, events)
        data.targets = part
        buffer.update_from_dataset(_make_taskaware_classification_dataset(data))
    return tuple(sorted(buffer.buffer.targets))


def kept_by_us(parts: list[list[int]], capacity: int, rng: np.random.Generator) -> tuple[int, ...]:
    kept, seen = np.zeros(0, dtype=np.int64), 0
    for part in parts:
        kept, seen = reservoir(kept, seen, np.array(part), capacity, rng)
    return tuple(sorted(kept.tolist()))


def test_both_reservoirs_keep_every_subset_of_the_stream_equally_often(request):
    """Six events in two slices, three kept: 20 subsets. The draws differ (slots here, keys there), the law does not."""
    parts, rng, n = [[0, 1], [2, 3, 4, 5]], np.random.default_rng(0), 500
    torch.manual_seed(0)
    ours = Counter(kept_by_us(parts, 3, rng) for _ in range(10 * n))
    theirs = Counter(kept_by_avalanche(parts, 3) for _ in range(n))
    subsets = list(itertools.combinations(range(6), 3))
    assert ours.keys() | theirs.keys() == set(subsets)
    shares = np.array([[ours[s] / (10 * n), theirs[s] / n] for s in subsets])
    chi_squared = (shares - 1 / 20) ** 2 * 20 * [10 * n, n]
    request.node.user_properties.append(("chi-squared, 19 degrees of freedom", chi_squared.sum(0).round(1).tolist()))
    request.node.user_properties.append(("largest difference of shares", float(np.ptp(shares, axis=1).max())))
    assert (chi_squared.sum(0) < 43.8).all()  # 1 in 1,000 for a right reservoir


def test_both_reservoirs_keep_all_while_there_is_room():
    parts = [[0, 1], [2, 3, 4]]
    assert kept_by_avalanche(parts, 5) == kept_by_us(parts, 5, np.random.default_rng(0)) == (0, 1, 2, 3, 4)
