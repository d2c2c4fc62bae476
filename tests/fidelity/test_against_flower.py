"""FedAvg and FedProx against Flower: the server's mean, and the clients' proximal term as Flower documents it.

docs/fidelity.md has the figures.
"""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from agreement import exactly
from torch import Generator, Tensor
from worlds import random_model, tiny_config, tiny_stream, warmed_up

from protofed.backbone.losses import LOSSES, window_losses
from protofed.client.lessons import chunks, draw_negatives_by_event
from protofed.federation.stacked import (
    ClientWeights,
    Deltas,
    LocalSteps,
    add_pull,
    clipped_sum,
    select_clients,
    targets_of,
    unflatten,
    weighted_sum,
)
from protofed.methods.baselines.federated import (
    Server,
    server_of,
    shared_layout,
    slice_data,
    start_state,
    weights_of,
    with_rows,
)
from protofed.methods.baselines.federated_rounds import (
    ROUND_KEYS,
    one_round,
    plain_losses,
    rounds_of,
    server_step,
    train_cohort,
)
from protofed.methods.protocol import World
from protofed.privacy.draws import SeededDraws, toss_coins
from protofed.slices.windows import take

INSTALL = "needs Flower: pip install flwr==1.41.0"
aggregate = pytest.importorskip("flwr.server.strategy.aggregate", reason=INSTALL).aggregate
flower = pytest.importorskip("flwr.serverapp.strategy", reason=INSTALL)
utilities = pytest.importorskip("flwr.serverapp.strategy.strategy_utils", reason=INSTALL)
app = pytest.importorskip("flwr.app", reason=INSTALL)

Model = dict[str, Tensor]
SIZES = (3, 1, 7, 2)  # train events of each client
EXACT = 1e-12


def by_the_function(models: list[Model], sizes: list[int]) -> Model:
    """Flower's mean of lists of arrays."""
    results = [([tensor.numpy() for tensor in model.values()], n) for model, n in zip(models, sizes, strict=True)]
    return {name: torch.from_numpy(array) for name, array in zip(models[0], aggregate(results), strict=True)}


def by_records(models: list[Model], sizes: list[int]) -> Model:
    """Flower's mean of the records that its strategies exchange."""
    replies = [
        app.RecordDict(
            {
                "arrays": app.ArrayRecord({name: app.Array(tensor.numpy()) for name, tensor in model.items()}),
                "metrics": app.MetricRecord({"num-examples": n}),
            }
        )
        for model, n in zip(models, sizes, strict=True)
    ]
    mean = utilities.aggregate_arrayrecords(replies, "num-examples")
    return {name: torch.from_numpy(np.array(array.numpy())) for name, array in mean.items()}


MEANS = {"function": by_the_function, "records": by_records}


def a_server() -> Server:
    """All weights of a small backbone with seven items."""
    model, prompt = random_model(7), torch.zeros(0, 8)
    return Server(model, prompt, shared_layout(model, prompt), model.has_row)


def some_deltas(server: Server) -> Deltas:
    """Four clients' movements: of all weights, and of the rows of some items, which they do not share all."""
    rng = Generator().manual_seed(0)
    clients, items = torch.tensor([0, 0, 1, 2, 2, 2, 3]), torch.tensor([1, 4, 4, 0, 1, 6, 4])
    dense = torch.randn(len(SIZES), server.layout.size, generator=rng) * torch.tensor([[0.1], [1.0], [2.0], [0.5]])
    return Deltas(ClientWeights(dense, torch.randn(len(items), 8, generator=rng)), clients, items, len(server.rows))


def moved_models(server: Server, deltas: Deltas, factors: Tensor | None = None) -> list[Model]:
    """Each client's whole model: the broadcast and (some factor of) its movement."""
    factors = torch.ones(len(deltas.stack.dense)) if factors is None else factors
    models = []
    for client, factor in enumerate(factors):
        model = {name: tensor.detach().clone() for name, tensor in weights_of(server.model, server.prompt).items()}
        for name, step in unflatten(server.layout, deltas.stack.dense[client]).items():
            model[name] += factor * step
        mine = deltas.clients == client
        model["items"][deltas.items[mine]] += factor * deltas.stack.rows[mine]
        models.append(model)
    return models


def weights_after(server: Server, dense: Tensor, table: Tensor) -> Model:
    return {name: tensor.detach() for name, tensor in server_step(server, dense, table).model.named_parameters()}


@exactly
@pytest.mark.parametrize("mean", MEANS)
def test_the_servers_step_is_flowers_mean_of_whole_models(mean, same):
    server = a_server()
    deltas, sizes = some_deltas(server), torch.tensor(SIZES, dtype=torch.float64)
    dense, table = weighted_sum(deltas, sizes)
    found = weights_after(server, dense / sizes.sum(), table / sizes.sum())
    same(found, MEANS[mean](moved_models(server, deltas), list(SIZES)))


@exactly
def test_the_private_step_is_flowers_unweighted_mean_times_the_cohort_over_its_expected_size(same):
    """Before noise: clients weigh the same, and the denominator is fixed, whoever came."""
    server, expected_size, radius = a_server(), 5.0, 30.0
    deltas = some_deltas(server)
    dense, table, factors = clipped_sum(deltas, radius)
    assert 0 < int((factors < 1).sum()) < len(SIZES)
    found = weights_after(server, dense / expected_size, table / expected_size)
    start = weights_after(server, torch.zeros_like(dense), torch.zeros_like(table))
    mean = by_the_function(moved_models(server, deltas, factors), [1] * len(SIZES))
    share = len(SIZES) / expected_size
    same(found, {name: start[name] + share * (mean[name] - start[name]) for name in mean})


def a_cohort(variant: str = "standard"):
    """Who is chosen in round 0 of slice 1 of the tiny world, and what they have."""
    world = World(tiny_config(variant=variant, privacy__sampling_rate=0.2), tiny_stream().slice_(0), warmed_up()[0])
    slice_, state = tiny_stream().slice_(1), start_state(world, prompted=variant == "peft")
    model = with_rows(world, state.backbone, slice_, train=variant == "standard")
    server, data = server_of(replace(state, backbone=model)), slice_data(world, slice_)
    coin = toss_coins(SeededDraws(world.config.seed), torch.arange(slice_.past.n_users), 0, 0.2)
    return world, slice_, state, server, data, select_clients(data, coin[data.users])


@pytest.mark.parametrize("variant", ["standard", "peft"])
def test_a_whole_round_is_flowers_mean_of_what_its_clients_have_learned(variant, same):
    world, slice_, state, server, data, cohort = a_cohort(variant)
    local = LocalSteps(3, 0.1)
    ((_, windows),) = chunks(cohort, 1_000, torch.device("cpu"))
    _, end, lesson, _ = train_cohort(world, server, windows, cohort.users, slice_, local, 0, plain_losses(world))
    models = []
    for client, weights in enumerate(end.dense):
        model = dict(weights_of(server.model, server.prompt)) | unflatten(server.layout, weights)
        mine = (lesson.clients == client) & server.rows[lesson.items.clamp(max=len(server.rows) - 1)]
        model["items"] = model["items"].detach().clone().index_put((lesson.items[mine],), end.rows[mine])
        models.append({name: tensor.detach().double() for name, tensor in model.items()})
    sizes = targets_of(windows, len(cohort)).tolist()
    assert len(set(sizes)) > 3
    rounds = rounds_of(world, state, slice_, local, 7)
    after, _ = one_round(world, server, data, slice_, rounds, 0, plain_losses(world))
    same(dict(weights_of(after.model, after.prompt)), by_the_function(models, sizes), 1e-5)  # float32


def proximal(mu: float, weights: list[Tensor], broadcast: list[Tensor]) -> Tensor:
    """mu / 2 ||w - w^t||^2, as the formula in Flower's documentation has it."""
    return mu / 2 * sum(((w - start) ** 2).sum() for w, start in zip(weights, broadcast, strict=True))


def sum_of_lengths(mu: float, weights: list[Tensor], broadcast: list[Tensor]) -> Tensor:
    """mu / 2 times each tensor's distance, not squared, as the example below that formula has it."""
    return mu / 2 * sum((w - start).norm() for w, start in zip(weights, broadcast, strict=True))


def test_flower_leaves_the_proximal_term_to_its_clients_and_documents_both_forms():
    """What the tests below compare with; only the formula is FedProx."""
    text = flower.FedProx.__doc__
    assert r"\frac{\mu}{2} || w - w^t ||^2" in text
    assert "(local_weights - global_weights).norm(2)" in text
    assert flower.FedProx.aggregate_train is flower.FedAvg.aggregate_train


def two_stacks() -> tuple[ClientWeights, ClientWeights]:
    rng = Generator().manual_seed(0)
    return tuple(ClientWeights(torch.randn(1, 5, generator=rng), torch.randn(3, 4, generator=rng)) for _ in range(2))


@exactly
def test_the_pulls_gradient_is_that_of_flowers_formula(same):
    at, anchor = two_stacks()
    found = add_pull(ClientWeights(torch.zeros(1, 5), torch.zeros(3, 4)), at, anchor, 0.3)
    leaves = [at.dense.clone().requires_grad_(True), at.rows.clone().requires_grad_(True)]
    expected = torch.autograd.grad(proximal(0.3, leaves, [anchor.dense, anchor.rows]), leaves)
    same({"dense": found.dense, "rows": found.rows}, dict(zip(("dense", "rows"), expected, strict=True)))


@exactly
def test_the_examples_gradient_times_twice_each_tensors_distance_is_ours(same):
    at, anchor = two_stacks()
    found = add_pull(ClientWeights(torch.zeros(1, 5), torch.zeros(3, 4)), at, anchor, 0.3)
    leaves = [at.dense.clone().requires_grad_(True), at.rows.clone().requires_grad_(True)]
    example = torch.autograd.grad(sum_of_lengths(0.3, leaves, [anchor.dense, anchor.rows]), leaves)
    distances = [(at.dense - anchor.dense).norm(), (at.rows - anchor.rows).norm()]
    expected = [2 * far * slope for far, slope in zip(distances, example, strict=True)]
    same({"dense": found.dense, "rows": found.rows}, dict(zip(("dense", "rows"), expected, strict=True)))


@pytest.mark.parametrize("mu", [0.0, 2.0])
def test_a_fedprox_client_descends_flowers_documented_loss(mu, same):
    """Three plain steps of each client's whole model by autograd, one client after another."""
    world, slice_, _, server, _, cohort = a_cohort()
    cohort = select_clients(cohort, torch.arange(len(cohort)) < 4)
    local = LocalSteps(3, 0.2, "sgd", 1e9, pull=mu)
    ((_, windows),) = chunks(cohort, 1_000, torch.device("cpu"))
    start, end, lesson, _ = train_cohort(world, server, windows, cohort.users, slice_, local, 0, plain_losses(world))
    found, expected = {}, {}
    for client in range(len(cohort)):
        model = copy.deepcopy(server.model).requires_grad_(True)
        broadcast = [weight.detach().clone() for weight in model.parameters()]
        mine = take(windows, (windows.users == client).nonzero()[:, 0])
        optimiser = torch.optim.SGD(model.parameters(), lr=0.2)
        for step in range(3):
            negatives = draw_negatives_by_event(
                mine,
                world.config.training.negatives,
                slice_.n_train_items,
                seed=world.config.seed,
                step=ROUND_KEYS + step,
            )
            sums, counts = window_losses(model, mine, negatives, LOSSES[world.config.training.loss])
            loss = sums.sum() / counts.sum() + proximal(mu, list(model.parameters()), broadcast)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        moved = {
            name: (weight - server.model.get_parameter(name)).detach() for name, weight in model.named_parameters()
        }
        own = lesson.clients == client
        moved["items"] = moved["items"][lesson.items[own]]
        steps = unflatten(server.layout, end.dense[client] - start.dense[client])
        found |= {f"{client} {name}": step for name, step in steps.items()}
        found[f"{client} items"] = (end.rows - start.rows)[own]
        expected |= {f"{client} {name}": step for name, step in moved.items()}
    same(found, expected, 1e-4)  # float32
