"""FedAvg, FedProx, Ditto on the tiny world: a round against a loop, identities, personal copies, the private form."""

import copy
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from worlds import every_value, questions, tiny_config, tiny_log, tiny_stream, warmed_up_on

from protofed.backbone.losses import LOSSES, window_losses
from protofed.backbone.new_items import with_new_rows
from protofed.backbone.training import PlainDescent
from protofed.client.lessons import client_data, draw_negatives_by_event
from protofed.data.interactions import from_codes
from protofed.errors import ConfigError
from protofed.methods.baselines import federated_rounds
from protofed.methods.baselines.ditto import Ditto
from protofed.methods.baselines.fedavg import FedAvg
from protofed.methods.baselines.federated import FederatedState, server_of
from protofed.methods.baselines.federated_rounds import ROUND_KEYS
from protofed.methods.baselines.fedprox import FedProx
from protofed.methods.baselines.fedrap import FedRAP
from protofed.methods.baselines.personal_copies import personal_layout, score_with_copies, with_copies
from protofed.methods.catalogue import configured
from protofed.methods.protocol import Releasing, World
from protofed.privacy.draws import SeededDraws, toss_coins
from protofed.privacy.ledger import Release
from protofed.seeds import numpy_stream
from protofed.slices.stream import SliceStream, TimeSlice
from protofed.slices.windows import NO_TARGET, take
from protofed.snapshot import restore, take_snapshot

VARIANTS = ["standard", "peft"]
NAMES = ["fedavg", "fedprox", "ditto", "fedrap"]
METHODS: dict[str, Any] = {
    "fedavg": partial(FedAvg, ft_steps=2),
    "fedprox": FedProx,
    "ditto": partial(Ditto, local_steps=4),
    "fedrap": partial(FedRAP, local_steps=4),
}


def world_of(**settings: object) -> World:
    config = tiny_config(**{"privacy__sampling_rate": 0.3, **settings})
    return World(config, tiny_stream().slice_(0), warmed_up_on(tiny_config(), tiny_stream())[0])


def first_slice(method: Any, world: World, slice_: TimeSlice | None = None) -> tuple[Any, dict]:
    state, told = method.learn(world, method.start(world), slice_ or tiny_stream().slice_(1), PlainDescent())
    return state, dict(told)


@cache
def after_slice_1(method: Any, variant: str = "standard", **settings: object) -> tuple[Any, dict]:
    return first_slice(method, world_of(variant=variant, **settings))


def second_slice(method: Any, world: World, state: Any) -> Any:
    return method.learn(world, state, tiny_stream().slice_(2), PlainDescent())[0]


def same(one: Any, other: Any) -> bool:
    left, right = every_value(one), every_value(other)
    return left.keys() == right.keys() and all(torch.equal(tensor, right[key]) for key, tensor in left.items())


def slow_round(world: World, rate: float, epochs: int, clip: float) -> tuple[dict[str, Tensor], int]:
    """Round 0 of slice 1 with a whole copy of the model for every client, one after another."""
    slice_, seed, training = tiny_stream().slice_(1), world.config.seed, world.config.training
    model = with_new_rows(world.backbone, slice_)[0].eval()
    rng = numpy_stream(seed, "client windows", 1)
    data = client_data(slice_.past, slice_.train_positions, length=12, stride=6, rng=rng)
    total, weight, uploads = {n: torch.zeros_like(p) for n, p in model.named_parameters()}, 0, 0
    for u in data.users.tolist():
        if not toss_coins(SeededDraws(seed), torch.tensor([u]), 0, world.config.privacy.sampling_rate):
            continue
        windows = take(data.windows, (data.windows.users == u).nonzero()[:, 0])
        client = copy.deepcopy(model).requires_grad_(True)
        optimiser = torch.optim.SGD(client.parameters(), lr=rate)
        for step in range(epochs):
            key = ROUND_KEYS + step
            negatives = draw_negatives_by_event(windows, training.negatives, slice_.n_train_items, seed=seed, step=key)
            sums, counts = window_losses(client, windows, negatives, LOSSES["softmax"])
            optimiser.zero_grad()
            (sums.sum() / counts.sum()).backward()
            torch.nn.utils.clip_grad_norm_(client.parameters(), clip)
            optimiser.step()
        n = int((windows.targets != NO_TARGET).sum())
        for name, parameter in client.named_parameters():
            total[name] += n * (parameter.detach() - dict(model.named_parameters())[name])
        weight, uploads = weight + n, uploads + 1
    return {n: p.detach() + total[n] / weight for n, p in model.named_parameters()}, uploads


def test_a_round_is_the_mean_of_whole_models_weighted_by_their_clients_events():
    world = world_of(privacy__rounds_per_slice=1)
    state, told = first_slice(FedAvg(optimiser="sgd", rate=0.3, ft_steps=0), world)
    expected, uploads = slow_round(world, 0.3, 3, world.config.training.max_grad_norm)
    assert told["uploads_per_round"] == uploads > 5
    for name, parameter in state.backbone.named_parameters():
        torch.testing.assert_close(parameter, expected[name], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_how_many_clients_are_computed_at_once_does_not_matter(name):
    brief = {"local_steps": 2} if name in ("ditto", "fedrap") else {}
    methods = [METHODS[name](chunk=n, optimiser="sgd", **brief) for n in (3, 64)]
    one, other = (every_value(after_slice_1(method, privacy__rounds_per_slice=2)[0]) for method in methods)
    for key, tensor in one.items():
        torch.testing.assert_close(tensor, other[key], atol=1e-5, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_fedprox_without_a_pull_is_fedavg_without_fine_tuning(variant):
    plain, _ = after_slice_1(FedAvg(ft_steps=0), variant)
    assert same(after_slice_1(FedProx(mu=0.0, peft_mu=0.0), variant)[0], plain)
    assert not same(after_slice_1(FedProx(), variant)[0], plain)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_stronger_the_pull_the_shorter_the_uploads(variant):
    lengths = [
        after_slice_1(FedProx(mu=mu, peft_mu=mu, optimiser="sgd", rate=0.1, peft_rate=0.1), variant)[1]["upload_norm"]
        for mu in (0.0, 1.0, 5.0)
    ]
    assert lengths[0] > lengths[1] > lengths[2] > 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_fine_tuning_leaves_what_the_server_learned_alone(variant):
    tuned, plain = after_slice_1(FedAvg(), variant)[0], after_slice_1(FedAvg(ft_steps=0), variant)[0]
    assert same(tuned.backbone, plain.backbone)
    assert torch.equal(tuned.prompt, plain.prompt)
    assert len(tuned.owners) > 20
    assert not len(plain.owners)


@pytest.mark.parametrize("variant", VARIANTS)
def test_ditto_without_a_pull_trains_purely_locally(variant):
    ditto = Ditto(strength=0.0, personal_rate=3e-4, peft_personal_rate=5e-2, local_steps=4)
    after, told = after_slice_1(ditto, variant)
    tuned, _ = after_slice_1(FedAvg(ft_steps=4, ft_rate=3e-4, peft_ft_rate=5e-2), variant)
    assert same(after, tuned)
    assert told["personal_shift"] > 0


def test_a_personal_prompt_without_a_pull_never_hears_of_the_shared_one():
    world, ditto = world_of(variant="peft", privacy__rounds_per_slice=0), Ditto(strength=0.0)
    state = after_slice_1(ditto, "peft")[0]
    elsewhere = replace(state, prompt=state.prompt + 1)
    met = torch.isin(second_slice(ditto, world, state).owners, state.owners)
    one, other = (second_slice(ditto, world, s).personal[met] for s in (state, elsewhere))
    assert torch.equal(one, other)
    one, other = (second_slice(Ditto(), world, s).personal[met] for s in (state, elsewhere))
    assert not torch.equal(one, other)


def test_ditto_keeps_copies_for_ever_and_fedavg_throws_them_away():
    world = world_of()
    for method, kept in ((Ditto(), True), (FedAvg(ft_steps=2), False)):
        state = after_slice_1(method)[0]
        later = second_slice(method, world, state)
        away = state.owners[~torch.isin(state.owners, active_in(2))]
        assert len(away)
        assert bool(torch.isin(away, later.owners).all()) == kept
        marked = replace(state, personal=state.personal + 0.1)
        assert same(second_slice(method, world, marked), later) == (not kept)
        if kept:
            places = [torch.isin(s.owners, away) for s in (state, later)]
            assert torch.equal(state.personal[places[0]], later.personal[places[1]])


def active_in(index: int) -> Tensor:
    slice_ = tiny_stream().slice_(index)
    return torch.from_numpy(slice_.past.users[slice_.train_positions]).unique()


def test_the_stronger_the_pull_the_nearer_the_copies():
    shifts = [
        after_slice_1(Ditto(strength=s, optimiser="sgd", personal_rate=0.1))[1]["personal_shift"] for s in (0.0, 5.0)
    ]
    assert shifts[0] > 1.5 * shifts[1] > 0


def test_copies_are_replaced_and_added_and_stay_sorted():
    state = after_slice_1(FedAvg(ft_steps=0))[0]
    first = with_copies(state, torch.tensor([2, 5, 9]), torch.tensor([[2.0], [5.0], [9.0]]))
    later = with_copies(first, torch.tensor([1, 5]), torch.tensor([[1.0], [50.0]]))
    assert later.owners.tolist() == [1, 2, 5, 9]
    assert later.personal[:, 0].tolist() == [1, 2, 50, 9]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_query_is_scored_with_its_users_copy_and_by_strangers_with_the_servers_weights(variant):
    state = after_slice_1(FedAvg(ft_rate=3e-2), variant)[0]
    _, queries = questions()
    strangers = ~torch.isin(queries.users, state.owners)
    found = score_with_copies(state, queries)
    common = score_with_copies(replace(state, owners=state.owners[:0], personal=state.personal[:0]), queries)
    assert 0 < int(strangers.sum()) < len(queries)
    torch.testing.assert_close(found[strangers], common[strangers], atol=1e-5, rtol=0)
    b = int((~strangers).nonzero()[0])
    copied = state.personal[state.owners == queries.users[b]][0]
    model, prompt = copy.deepcopy(state.backbone), None
    if variant == "peft":
        prompt = copied.reshape(1, *state.prompt.shape)
    else:
        layout = personal_layout(model, state.prompt)
        torch.nn.utils.vector_to_parameters(copied, [dict(model.named_parameters())[n] for n in layout.names])
    alone = model.scores(model.last_hidden(queries.tokens[b : b + 1], prompt), queries.n_items)[0]
    torch.testing.assert_close(found[b], alone, atol=1e-5, rtol=0)
    assert not torch.allclose(found[b], common[b], atol=1e-3)


def test_the_standard_variant_moves_every_weight_and_the_peft_variant_the_prompt_alone():
    world, slice_ = world_of(), tiny_stream().slice_(1)
    first = with_new_rows(world.backbone, slice_)[0]
    moved, stays = after_slice_1(FedAvg())[0], after_slice_1(FedAvg(), "peft")[0]
    for name, parameter in first.named_parameters():
        assert not torch.equal(dict(moved.backbone.named_parameters())[name], parameter)
        assert torch.equal(dict(stays.backbone.named_parameters())[name], parameter)
    start = FedAvg().start(world_of(variant="peft")).prompt
    assert start.shape == (2, 16)
    assert not torch.equal(stays.prompt, start)
    assert not len(moved.prompt)


def test_bytes_and_parameters_are_those_of_the_tensors_that_travel():
    for variant, shared, own in (
        ("standard", lambda s: sum(p.numel() for p in s.backbone.parameters()) - 16 * int((~s.backbone.has_row).sum()),
         lambda s: sum(p.numel() for p in (*s.backbone.blocks[-1].parameters(), *s.backbone.norm.parameters()))),
        ("peft", lambda s: 2 * 16, lambda s: 2 * 16),
    ):  # fmt: skip
        state, told = after_slice_1(FedAvg(), variant)
        assert told["trainable_parameters"] == shared(state)
        assert told["bytes_up"] == told["bytes_down"] == 4 * shared(state)
        assert told["trainable_parameters_per_user"] == own(state) == state.personal.shape[1]
        assert told["rounds"] == 4


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_slice_without_train_events_and_one_with_a_single_event_are_learned(name, variant):
    world, method = world_of(variant=variant), METHODS[name]()
    state = after_slice_1(method, variant)[0]
    slice_ = tiny_stream().slice_(2)
    last = slice_.bounds[-1]
    for n in (0, 1):
        short = replace(slice_, bounds=(*slice_.bounds[:-1], replace(last, train_end=last.start + n)))
        after, told = method.learn(world, state, short, PlainDescent())
        assert told["active_clients"] == n
        assert method.score(world, after, questions(2)[1]).isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_the_peft_variant_survives_a_checkpoint(name):
    world, method = world_of(variant="peft"), METHODS[name]()
    state = after_slice_1(method, "peft")[0]
    back = restore(take_snapshot(state))
    assert same(back, state)
    assert same(second_slice(method, world, back), second_slice(method, world, state))


@cache
def another_validation() -> SliceStream:
    """The same stream, but for who meets what in the validation part of slice 1."""
    log, bounds = tiny_log(), tiny_stream().bounds[1]
    columns, rng = [], np.random.default_rng(3)
    for column in (log.users, log.items):
        codes = column.numpy().astype(np.int64)
        codes[bounds.train_end : bounds.val_end] = rng.permutation(codes[bounds.train_end : bounds.val_end])
        columns.append(codes)
    shuffled = from_codes(log.name, *columns, log.times.numpy(), log.user_ids, log.item_ids)
    return SliceStream(shuffled, tiny_config().stream)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("private", [False, True])
def test_the_validation_part_does_not_matter(name, private):
    slice_, other = tiny_stream().slice_(1), another_validation().slice_(1)
    assert other.past.n_users == slice_.past.n_users  # N is public
    assert other.validation.positives.tolist() != slice_.validation.positives.tolist()
    settings = {"privacy__wrap": private}
    method = METHODS[name]()
    assert same(first_slice(method, world_of(**settings), other)[0], after_slice_1(method, **settings)[0])


def shared_of(state: Any) -> FederatedState:
    return state if isinstance(state, FederatedState) else state.shared


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_noise_of_the_promised_size_reaches_every_coordinate_that_trains(name, variant, monkeypatch):
    """Where nobody's coin falls, what is left of a release is its noise, divided by the fixed q N."""
    monkeypatch.setattr(federated_rounds, "toss_coins", lambda draws, users, round_, rate: users < 0)
    settings = {"privacy__rounds_per_slice": 1, "privacy__noise_multiplier": 2.0, "privacy__clip_radius": 3.0}
    world = world_of(variant=variant, privacy__wrap=True, **settings)
    method = METHODS[name]()
    state, told = first_slice(method, world)
    assert told["uploads_per_round"] == 0
    start, after = shared_of(method.start(world)), shared_of(state)
    n_users, n_rows = tiny_stream().slice_(1).past.n_users, tiny_stream().slice_(1).n_train_items
    step = torch.cat([(after.prompt - start.prompt).flatten(), *item_steps(name, variant, world, after)])
    if variant == "standard":
        assert after.backbone.n_rows == n_rows
    assert (step != 0).all()
    assert float(step.std()) == pytest.approx(2 * 3 / (0.3 * n_users), rel=0.3 if len(step) < 100 else 0.1)


def item_steps(name: str, variant: str, world: World, after: FederatedState) -> list[Tensor]:
    """How far the rows that train moved; items after the base block started at the mean row."""
    old = world.backbone
    start = old.mean_row.repeat(after.backbone.n_rows, 1)
    start[: old.n_rows][old.has_row] = old.items[old.has_row]
    step = after.backbone.items.detach() - start[: len(after.backbone.items)]
    if variant == "standard":
        return [step.flatten()]
    if name != "fedrap":
        assert not step.any()
        return []
    new = torch.ones(len(step), dtype=torch.bool)
    new[: old.n_rows] = ~old.has_row
    assert not step[~new].any()
    return [step[new].flatten()]


@pytest.mark.parametrize("name", NAMES)
def test_releases_are_declared_ahead_and_only_where_there_is_noise(name):
    world, method = world_of(privacy__wrap=True), METHODS[name]()
    state = method.start(world)
    assert isinstance(method, Releasing)
    assert method.releases(world, state) == ()
    assert method.releases(world, state, 1) == (Release(1.0, 0.3, 4, stream="weights"),)
    after = after_slice_1(method, privacy__wrap=True)[0]
    assert method.releases(world, after) == method.releases(world, state, 1)
    assert method.releases(world, after, 5) == (Release(1.0, 0.3, 8, stream="weights"),)  # 2 slices of 4 rounds in all
    plain = world_of()
    assert method.releases(plain, method.start(plain), 1) == ()
    assert method.releases(plain, after_slice_1(method)[0], 1) == ()


def test_rounds_end_where_the_budget_does():
    method, world = FedAvg(ft_steps=0), world_of(privacy__wrap=True)
    state = replace(method.start(world), allowed_rounds=3)
    after, told = method.learn(world, state, tiny_stream().slice_(1), PlainDescent())
    assert told["rounds"] == after.rounds == 3
    assert second_slice(method, world, after).rounds == 3


def test_noise_changes_the_weights_and_a_private_run_starts_new_items_at_the_mean_row():
    noisy, plain = (after_slice_1(FedAvg(ft_steps=0), privacy__wrap=on)[0] for on in (True, False))
    assert not torch.equal(noisy.backbone.bos, plain.backbone.bos)
    world = world_of(privacy__wrap=True, privacy__rounds_per_slice=0)
    still = first_slice(FedAvg(ft_steps=0), world)[0].backbone
    new = ~torch.nn.functional.pad(world.backbone.has_row, (0, still.n_rows - world.backbone.n_rows))
    assert new.any()
    assert still.has_row.all()
    assert torch.equal(still.items[new], world.backbone.mean_row.expand(int(new.sum()), -1))


@pytest.mark.parametrize("name", NAMES)
def test_noise_has_no_second_switch_among_the_hyper_parameters(name):
    with pytest.raises(ConfigError, match=r"unknown config key 'hyper\.private'"):
        configured(tiny_config(method=name, hyper="private = true"))


def test_a_trust_model_without_a_mechanism_is_refused():
    with pytest.raises(ConfigError, match="central trust only, got trust 'local'"):
        FedAvg().start(world_of(privacy__wrap=True, privacy__trust="local"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_an_upload_does_not_depend_on_its_clients_earlier_coins(name, variant, monkeypatch):
    """The server is kept from moving, so that earlier coins could act through the devices alone."""
    world, method, user = world_of(variant=variant, privacy__wrap=True), METHODS[name](), int(active_in(2)[0])
    server_step, clipped_sum = federated_rounds.server_step, federated_rounds.clipped_sum

    def history(mine: list[bool]) -> list[Any]:
        """The uploads of a user with these coins, when nobody else takes part."""
        seen = []

        def coin(draws: SeededDraws, users: Tensor, round_: int, rate: float) -> Tensor:
            return (users == user) & mine[round_]

        def watched(deltas: Any, radius: float) -> Any:
            seen.append(deltas.stack)
            return clipped_sum(deltas, radius)

        monkeypatch.setattr(federated_rounds, "toss_coins", coin)
        monkeypatch.setattr(federated_rounds, "clipped_sum", watched)
        monkeypatch.setattr(federated_rounds, "server_step", lambda server, d, t: server_step(server, 0 * d, 0 * t))
        state = method.start(world)
        for index in (1, 2):
            state, _ = method.learn(world, state, tiny_stream().slice_(index), PlainDescent())
        return seen

    often, seldom = history([True] * 8), history([False] * 7 + [True])
    assert len(often) > len(seldom) == 1
    assert torch.equal(often[-1].dense, seldom[0].dense)
    assert torch.equal(often[-1].rows, seldom[0].rows)
    if name != "fedrap" or variant == "standard":  # else: this client met no item that came after the base block
        assert often[-1].dense.any() or often[-1].rows.any()


def test_no_upload_is_longer_than_the_radius_and_the_divisor_is_fixed(monkeypatch):
    """With one client and hardly any noise the server moves by radius / (q N), however far the client went."""
    user = int(active_in(1)[0])
    monkeypatch.setattr(federated_rounds, "toss_coins", lambda draws, users, round_, rate: users == user)
    settings = {"privacy__noise_multiplier": 1e-9, "privacy__rounds_per_slice": 1, "privacy__clip_radius": 0.05}
    world = world_of(privacy__wrap=True, **settings)
    method = FedAvg(ft_steps=0, rate=1e-2)
    after, told = first_slice(method, world)
    assert told["upload_norm"] > 0.05
    assert told["clipped_share"] == 1
    before = first_slice(method, world_of(**{**settings, "privacy__wrap": True, "privacy__rounds_per_slice": 0}))[0]
    pairs = zip(server_of(after).model.parameters(), before.backbone.parameters(), strict=True)
    moved = sum(float((one - other).double().square().sum()) for one, other in pairs) ** 0.5
    assert moved == pytest.approx(0.05 / (0.3 * tiny_stream().slice_(1).past.n_users), rel=1e-2)


@pytest.mark.parametrize("wrap", [False, True])
def test_a_slice_without_rounds_tells_that_there_were_none_and_no_mean_over_nothing(wrap):
    world, method = world_of(privacy__wrap=wrap), FedAvg()
    _, told = method.learn(
        world, replace(method.start(world), allowed_rounds=0), tiny_stream().slice_(1), PlainDescent()
    )
    assert told["rounds"] == 0
    assert not {"uploads_per_round", "client_loss", "upload_norm", "clipped_share"} & set(told)
    assert told["personal_shift"] > 0  # devices learn on
