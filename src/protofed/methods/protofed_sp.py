"""ProtoFed-SP: a frozen backbone, prompts and item rows on the devices, prototypes shared under differential privacy.

What we implement: paper-notes' reference algorithm. Every client keeps a long prompt tied to prototypes and a short,
sparse one; queries are routed to prototypes and the composed prompt is injected; clipped embeddings of long prompts are
summed with noise and move the prototypes. How it differs: clients also keep rows of their own for the items they met,
and each uses its prompt and its rows only where its own validation events say so. In the private mode items that
appeared after the base block get rows from noised sums where a rehearsal says so, and nothing else is shared.
Privacy: docs/privacy.md.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from protofed.backbone.sasrec import SASRec
from protofed.backbone.training import Descend
from protofed.client.drift import Gate
from protofed.client.own_rows import OwnRows, subset, with_met_items
from protofed.config import RunConfig, ablated
from protofed.evaluation.efficiency import broadcast_bytes, module_bytes, tensor_bytes
from protofed.federation.acceptance import VARIANTS, accepted, remembered, variant_losses
from protofed.federation.lessons import brief_data, client_data, session_starts
from protofed.federation.newcomers import Newcomers, met_newcomers, nobody_new, rehearsed, worth_telling
from protofed.federation.plan import Plan, newcomer_releases, plan, releases
from protofed.federation.preparation import everybody_uses, prepare
from protofed.federation.simulator import Encoders, Schedule, broadcast, simulate_slice, tastes
from protofed.federation.table import ClientTable, drift_of, grown, prompts_of
from protofed.inference.device import Device, Model, new_device
from protofed.inference.online import Devices, online_inference
from protofed.methods.frozen import BackboneState, learn_new_rows
from protofed.methods.protocol import Diagnostics, World
from protofed.methods.protofed_rules import (
    as_run,
    keeps_the_claim,
    local_rule,
    may_introduce,
    may_use,
    server_rule,
    uploads_happen,
)
from protofed.privacy.ledger import Ledger
from protofed.privacy.mechanism import seeded_noise
from protofed.privacy.upload import upload_bytes
from protofed.seeds import numpy_stream, stream
from protofed.server.aggregate import ServerRule, slice_end
from protofed.server.library import PrototypeLibrary, check_cohort
from protofed.slices.histories import Queries
from protofed.slices.leaks import Evidence
from protofed.slices.stream import TimeSlice

PRINTED_PERIOD = 500  # local steps between two uploads of a client


@dataclass(frozen=True, slots=True)
class ProtoFedState:
    """Everything ProtoFed-SP carries from slice to slice."""

    backbone: SASRec
    codec: nn.Module
    g: nn.Module
    gate: Gate
    kappa: float
    library: PrototypeLibrary
    table: ClientTable
    rows: OwnRows
    met_boost: float
    just_met: float
    prior: Float[Tensor, " V"]
    use_prompt: Bool[Tensor, " N"]
    use_rows: Bool[Tensor, " N"]
    newcomers: Newcomers
    newcomer_noise: float
    noise_multiplier: float
    allowed_rounds: int
    rounds: int  # made so far
    slice_index: int
    newest_target: int


@dataclass(frozen=True, slots=True)
class ProtoFedSP:
    """Dual-timescale soft prompts on the devices, aligned with federated prototypes."""

    def start(self, world: World) -> ProtoFedState:
        """The base block: encoders, first prototypes, base users' devices; and the noise the budget asks for."""
        config = as_run(world.config)
        keeps_the_claim(config)
        settled, maps = settled_plan(world, config)
        server_rule(config, 1, settled.noise_multiplier, 1)  # what cannot be done is refused before any work
        if config.protofed.mode == "reference" and config.protofed.prototypes:
            check_cohort(config.protofed.prototypes, config.privacy.sampling_rate, world.base.past.n_users)
        made = prepare(config, world.base, world.backbone, local_rule(config), world.progress)
        use_prompt, use_rows = accepted(made.table.losses, made.prior, may_use(config))
        codec, g = made.encoders.codec, made.encoders.g
        assert isinstance(codec, nn.Module)
        return ProtoFedState(
            backbone=world.backbone,
            codec=codec,
            g=g,
            gate=made.encoders.gate,
            kappa=made.encoders.kappa,
            library=made.library,
            table=made.table,
            rows=made.rows,
            met_boost=made.met_boost,
            just_met=made.just_met,
            prior=made.prior,
            use_prompt=use_prompt,
            use_rows=use_rows,
            newcomers=nobody_new(maps),
            newcomer_noise=settled.newcomer_noise,
            noise_multiplier=settled.noise_multiplier,
            allowed_rounds=settled.rounds,
            rounds=0,
            slice_index=world.base.index,
            newest_target=max(made.newest_target, int(world.base.train_positions[-1])),
        )

    def learn(
        self, world: World, state: ProtoFedState, slice_: TimeSlice, descend: Descend
    ) -> tuple[ProtoFedState, Diagnostics]:
        """All local steps and rounds of one slice; only noised sums reach the server in the private mode."""
        config = as_run(world.config)
        state, new_rows = with_public_rows(world, state, slice_, descend)
        rule, k = local_rule(config), state.library.n_prototypes
        taught = (
            world.backbone if state.newcomer_noise else state.backbone
        )  # one's own neighbours know better than noise
        server = server_rule(config, k, state.noise_multiplier, len(state.table))
        table, own = grown(state.table, slice_.past.n_users), state.rows
        schedule = schedule_of(config, state, slice_)
        data = client_data(
            slice_.past,
            slice_.train_positions,
            length=config.backbone.history_length,
            stride=config.training.stride,
            rng=numpy_stream(config.seed, "client windows", slice_.index),
        )
        brief = brief_data(
            data,
            slice_.past,
            slice_.train_positions,
            length=config.protofed.prompt_history,
            rng=numpy_stream(config.seed, "brief client windows", slice_.index),
        )
        if rule.use_rows:
            boost = state.met_boost * tastes(state.backbone, own, data, config.protofed.chunk)
            own = with_met_items(own, taught, slice_.past, slice_.bounds[-1].train_end, data.users, boost)
        gap = 3600 * config.protofed.session_gap_hours
        sessions = session_starts(slice_.past, slice_.train_positions, gap)
        library, own, told = simulate_slice(
            state.backbone, encoders_of(state), state.library, table, own, data, sessions, rule, server, schedule, brief
        )
        reseeded = 0
        if schedule.rounds and config.protofed.mode != "literal":
            library, reseeded = slice_end(library, server, stream(config.seed, "pruning", slice_.index))
        newest = int(data.windows.newest.max()) if len(data) else -1
        state = replace(
            state,
            library=library,
            table=table,
            rows=own,
            rounds=state.rounds + schedule.rounds,
            slice_index=slice_.index,
            newest_target=max(state.newest_target, newest),
        )
        state = chosen_by_validation(config, state, slice_)
        if rule.use_rows:  # only now: the choice must not be made on rows that its own questions gave rise to
            own = with_met_items(own, taught, slice_.past, len(slice_.past), data.users, boost)
            state = replace(state, rows=own)
        used = {"use_prompt": float(state.use_prompt.float().mean()), "use_rows": float(state.use_rows.float().mean())}
        used |= {"just_met": state.just_met} if config.protofed.at_once else {}
        costs = costs_of(config, state, server)
        return state, {**new_rows, **told, **used, **costs, "reseeded": reseeded, "own_rows": len(own)}

    def score(self, world: World, state: ProtoFedState, queries: Queries) -> Float[Tensor, "B I"]:
        rule = local_rule(as_run(world.config))
        shared = broadcast(state.backbone, encoders_of(state).codec, state.library.v)
        return online_inference(
            shared, encoders_of(state).g, state.gate, rule, devices_of(world.config, state), queries
        )

    def evidence(self, state: ProtoFedState) -> Evidence:
        return Evidence(state.slice_index, newest_target=state.newest_target, item_rows=state.backbone.n_rows)

    def releases(self, world: World, state: ProtoFedState, slices_ahead: int = 0) -> Ledger:
        """What has left the devices so far, and what the next slices will make leave; nothing where there is no noise.

        The modes without noise carry no claim: new item rows are learned from raw events there, too.
        """
        config = as_run(world.config)
        if config.protofed.mode != "reference":
            return ()
        settled = Plan(state.noise_multiplier, state.allowed_rounds)
        rounds = state.rounds + slices_ahead * config.privacy.rounds_per_slice
        prototypes = releases(config.privacy, settled, rounds) if uploads_happen(config) else ()
        return prototypes + newcomer_releases(state.newcomer_noise, state.slice_index + slices_ahead)


def costs_of(config: RunConfig, state: ProtoFedState, server: ServerRule) -> dict[str, int | float]:
    """What a client sends and receives in a round, and what learns: prototypes for all, prompts and own rows of each.

    The introductions of new items travel once a slice and are not in the round's bytes.
    """
    settings, backbone = config.protofed, config.backbone
    up, down = upload_bytes(server.upload, server.trust), state.library.n_prototypes * settings.embedding * 4
    sends = uploads_happen(config)
    devices = max(int(state.table.met.sum()), 1)
    return {
        "bytes_up": up if sends else 0,
        "bytes_down": down if sends else 0,
        "trainable_parameters": state.library.v.numel(),
        "trainable_parameters_per_user": 2 * backbone.prompt_length * backbone.width
        + len(state.rows) * backbone.width / devices,
        **memory_of(config, state, devices),
    }


def memory_of(config: RunConfig, state: ProtoFedState, devices: int) -> dict[str, int | float]:
    """What a client keeps between slices, from shapes: no optimiser state, no activations. Own rows: mean over clients.

    The library counts twice, as it is sent and decoded into prompts; a row counts with the number of its item.
    """
    library, backbone, rows, n = state.library, config.backbone, state.rows, max(len(state.table), 1)
    own = [getattr(state.table, field.name) for field in fields(state.table)]
    row_bytes = tensor_bytes([rows.rows, rows.items])
    return {
        "device_bytes_backbone": module_bytes(state.backbone),
        "device_bytes_encoders": module_bytes(state.codec) + module_bytes(state.g),
        "device_bytes_prototypes": tensor_bytes([library.v])
        + broadcast_bytes(library.n_prototypes, backbone.prompt_length, backbone.width),
        "device_bytes_prompts": tensor_bytes(own) // n,
        "device_bytes_rows": row_bytes / devices,
    }


def schedule_of(config: RunConfig, state: ProtoFedState, slice_: TimeSlice) -> Schedule:
    """Steps and rounds of one slice; rounds end where the budget does."""
    privacy, settings = config.privacy, config.protofed
    left = max(0, state.allowed_rounds - state.rounds)
    rounds = min(privacy.rounds_per_slice, left) if uploads_happen(config) else 0
    if settings.mode == "literal":
        before = (slice_.index - 1) * settings.local_steps
        rounds = (before + settings.local_steps) // PRINTED_PERIOD - before // PRINTED_PERIOD
    personal = "personal" not in ablated(settings)
    return Schedule(
        local_steps=settings.local_steps if personal else 0,
        rounds=rounds,
        first_round=state.rounds,
        sampling_rate=privacy.sampling_rate,
        negatives=config.training.negatives,
        n_items=slice_.n_train_items,
        chunk=settings.chunk,
        lambda_max=settings.lambda_max,
        carry=settings.carry,
        seed=config.seed,
        slice_index=slice_.index,
    )


def with_public_rows(
    world: World, state: ProtoFedState, slice_: TimeSlice, descend: Descend
) -> tuple[ProtoFedState, dict[str, Any]]:
    """Public rows of new items: by the shared rule, in the private mode from noised sums or not at all."""
    if world.config.protofed.mode == "reference":
        return introduced(world, state, slice_) if state.newcomer_noise else (state, {})
    before = BackboneState(state.backbone, state.slice_index, state.newest_target)
    after, told = learn_new_rows(world, before, slice_, descend)
    return replace(state, backbone=after.backbone, newest_target=after.newest_target), dict(told)


def introduced(world: World, state: ProtoFedState, slice_: TimeSlice) -> tuple[ProtoFedState, dict[str, Any]]:
    """Rows of all items that came after the base block, from this slice's and earlier noised introductions."""
    noise = seeded_noise(stream(world.config.seed, "newcomer noise", slice_.index))
    newcomers, backbone, said = met_newcomers(state.newcomers, world.backbone, slice_, state.newcomer_noise, noise)
    told = {"introduced": int((newcomers.exposures > 0).sum()), "introducing_clients": len(said.users.unique())}
    return replace(state, newcomers=newcomers, backbone=backbone), told


def settled_plan(world: World, config: RunConfig) -> tuple[Plan, Float[Tensor, "T f d"]]:
    """The noise of the stream, and the maps from new items' noised sums to rows; none where they are not worth it."""
    private, n_slices = config.protofed.mode == "reference", config.stream.n_slices
    nothing = torch.zeros(0, 1, config.backbone.width)
    without = plan(config.privacy, n_slices, private=private)
    if not may_introduce(config):
        return without, nothing
    settled = plan(config.privacy, n_slices, private=private, newcomers=True)
    noise, seed = settled.newcomer_noise, config.seed
    maps = rehearsed(world.backbone, world.base, n_slices, noise, seed)
    if config.protofed.newcomers == "noised" or worth_telling(world.backbone, world.base, maps, noise, seed):
        return settled, maps
    return without, nothing


def encoders_of(state: ProtoFedState) -> Encoders:
    codec, g = state.codec, state.g
    return Encoders(codec, g, state.gate, state.kappa)  # type: ignore[arg-type]


def devices_of(config: RunConfig, state: ProtoFedState) -> Devices:
    """The devices as ranking reads them."""
    everything = everybody_uses(state.table, state.rows, state.backbone.items.device, state.just_met)
    nobody = torch.zeros(1, len(VARIANTS), device=state.prior.device)
    prompt, rows = accepted(nobody, state.prior, may_use(config))
    device = everything.met.device
    return replace(
        everything,
        use_prompt=state.use_prompt.to(device),
        use_rows=state.use_rows.to(device),
        newcomers_use_prompt=bool(prompt),
        newcomers_use_rows=bool(rows),
    )


def on_device_model(config: RunConfig, state: ProtoFedState, n_items: int) -> Model:
    """What every device holds after a slice, for `inference.device`: `recommend` and `feedback` of a single user."""
    settings, encoders = config.protofed, encoders_of(state)
    shared = broadcast(state.backbone, encoders.codec, state.library.v)
    return Model(
        shared,
        encoders.g,
        state.gate,
        local_rule(as_run(config)),
        n_items,
        carry=settings.carry,
        session_gap_hours=settings.session_gap_hours,
        negatives=config.training.negatives,
        seed=config.seed,
        just_met=state.just_met,
    )


def device_of_user(
    config: RunConfig, state: ProtoFedState, user: int, items: Int[Tensor, " n"], times: Int[Tensor, " n"]
) -> Device:
    """One user's device after a slice, with the user's events so far; a user nobody met has an empty one."""
    model = on_device_model(config, state, 1)
    if user >= len(state.table) or not bool(state.table.met[user]):
        everybody = devices_of(config, state)
        prompt, rows = everybody.newcomers_use_prompt, everybody.newcomers_use_rows
        return replace(new_device(model), items=items, times=times, use_prompt=prompt, use_rows=rows)
    device, whose = model.shared.v.device, torch.tensor([user], device=state.rows.clients.device)
    return Device(
        prompts=prompts_of(state.table, whose, device),
        rows=subset(state.rows, whose)[0],
        drift=drift_of(state.table, whose, device),
        items=items.to(device),
        times=times.to(device),
        met=True,
        use_prompt=bool(state.use_prompt[user]),
        use_rows=bool(state.use_rows[user]),
    )


def chosen_by_validation(config: RunConfig, state: ProtoFedState, slice_: TimeSlice) -> ProtoFedState:
    """Each client's choice of prompt and own rows, after its validation events of the slice."""
    allowed, rule = may_use(config), local_rule(config)
    table = state.table
    if sum(allowed) > 1:
        shared = broadcast(state.backbone, encoders_of(state).codec, state.library.v)
        devices = everybody_uses(table, state.rows, state.backbone.items.device, state.just_met)
        losses, users = variant_losses(
            shared, encoders_of(state).g, state.gate, rule, devices, slice_, config.backbone.history_length
        )
        evidence = remembered(table.losses, losses.to(table.device), users.to(table.device))
        table = replace(table, losses=evidence)
    use_prompt, use_rows = accepted(table.losses, state.prior.to(table.device), allowed)
    return replace(state, table=table, use_prompt=use_prompt, use_rows=use_rows)
