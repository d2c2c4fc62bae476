"""ProtoFed-SP: a frozen backbone, prompts and item rows on the devices, prototypes shared under differential privacy.

What we implement: paper-notes' reference algorithm. Every client keeps a long prompt tied to prototypes and a short,
sparse one; queries are routed to prototypes and the composed prompt is injected; clipped embeddings of long prompts are
summed with noise and move the prototypes. How it differs: clients also keep rows of their own for the items they met,
and each uses its prompt and its rows only where its own validation events say so. In the private mode items that
appeared after the base block get rows from noised sums where a rehearsal says so, and nothing else is shared.
Privacy: docs/privacy.md.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from protofed.backbone.sasrec import SASRec
from protofed.backbone.training import Descend
from protofed.client.codec import Codec, QueryEncoder
from protofed.client.drift import Gate
from protofed.client.model import Encoders, Model, receive
from protofed.client.state import DeviceState, choose_variants, columns, resize, to_device
from protofed.config import RunConfig
from protofed.evaluation.efficiency import broadcast_bytes, module_bytes, tensor_bytes
from protofed.federation.newcomers import Newcomers, nobody_new, rehearse_maps, release_introductions, worth_telling
from protofed.federation.plan import Plan, ledger, plan_releases
from protofed.federation.preparation import ask_base_users, prepare
from protofed.federation.rounds import Costs
from protofed.federation.simulator import Schedule, finish_slice, simulate_slice
from protofed.inference.online import online_inference
from protofed.methods.frozen import BackboneState, learn_new_rows
from protofed.methods.protocol import Diagnostics, Published, World
from protofed.methods.protofed_rules import (
    as_run,
    check_claim,
    local_rule,
    may_introduce,
    round_rule,
    streams_asked,
    uploads_happen,
)
from protofed.privacy.draws import SeededDraws
from protofed.privacy.ledger import Ledger
from protofed.privacy.mechanism import seeded_noise
from protofed.privacy.upload import RoundRule, upload_bytes
from protofed.seeds import stream
from protofed.server.aggregate import slice_end
from protofed.server.library import PrototypeLibrary, check_cohort
from protofed.slices.histories import Queries
from protofed.slices.leaks import Evidence
from protofed.slices.stream import TimeSlice

TOGETHER = 0.7  # of its share, for rows of new items where another release is paid beside them
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
    devices: DeviceState
    met_boost: float
    just_met: float
    prior: Float[Tensor, " V"]
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
        check_claim(config)
        world.progress("noise for the budget", 0, None)
        (prototypes, rows), maps = plan_noise(world, config)
        round_rule(config, 1, prototypes.noise_multiplier, world.base.past.n_users)  # refused before any work
        if config.protofed.mode == "reference" and config.protofed.prototypes:
            check_cohort(config.protofed.prototypes, config.privacy.sampling_rate, world.base.past.n_users)
        made = prepare(config, world.base, world.backbone, local_rule(config), world.progress)
        codec, g = made.encoders.codec, made.encoders.g
        assert isinstance(codec, nn.Module)
        return ProtoFedState(
            backbone=world.backbone,
            codec=codec,
            g=g,
            gate=made.encoders.gate,
            kappa=made.encoders.kappa,
            library=made.library,
            devices=made.devices,
            met_boost=made.met_boost,
            just_met=made.just_met,
            prior=made.prior,
            newcomers=nobody_new(maps),
            newcomer_noise=rows.noise_multiplier,
            noise_multiplier=prototypes.noise_multiplier,
            allowed_rounds=prototypes.rounds,
            rounds=0,
            slice_index=world.base.index,
            newest_target=int(world.base.train_positions[-1]),
        )

    def learn(
        self, world: World, state: ProtoFedState, slice_: TimeSlice, descend: Descend
    ) -> tuple[ProtoFedState, Diagnostics]:
        """All local steps and rounds of one slice; only noised sums reach the server in the private mode."""
        config = as_run(world.config)
        state, new_rows = with_public_rows(world, state, slice_, descend)
        devices = resize(state.devices, torch.from_numpy(slice_.user_keys))
        rule = round_rule(config, state.library.n_prototypes, state.noise_multiplier, len(devices))
        schedule, model = schedule_of(config, state, slice_), model_of(world, state, slice_.n_train_items)
        library, devices, told = simulate_slice(model, state.library, devices, slice_, rule, schedule, world.progress)
        reseeded = 0
        if schedule.rounds and config.protofed.mode != "literal":
            library, reseeded = slice_end(library, rule, stream(config.seed, "pruning", slice_.index))
        devices = finish_slice(receive(model, library.broadcast()), devices, slice_, world.head)
        state = replace(
            state,
            library=library,
            devices=devices,
            rounds=state.rounds + schedule.rounds,
            slice_index=slice_.index,
            newest_target=newest_target_of(state, slice_),
        )
        told |= {**new_rows, **choices_of(config, state), **costs_of(config, state, rule), "reseeded": reseeded}
        return state, told

    def score(self, world: World, state: ProtoFedState, queries: Queries) -> Float[Tensor, "B I"]:
        model = model_of(world, state, queries.n_items)
        return online_inference(model, to_device(state.devices, model.v.device), queries)

    def evidence(self, state: ProtoFedState) -> Evidence:
        return Evidence(state.slice_index, newest_target=state.newest_target, item_rows=state.backbone.n_rows)

    def publish(self, world: World, state: ProtoFedState, n_items: int) -> Published:
        config = as_run(world.config)
        rule = round_rule(config, state.library.n_prototypes, state.noise_multiplier, len(state.devices))
        return Published(model_of(world, state, n_items), state.devices, rule, state.rounds)

    def choose_under(self, world: World, state: ProtoFedState) -> tuple[ProtoFedState, bool]:
        """The state whose devices chose under the world's head; whether base users' prompts pay in the mean."""
        config, model = as_run(world.config), model_of(world, state, world.base.n_train_items)
        allowed, devices, prior = model.rule.allowed, state.devices, state.prior
        if sum(allowed) > 1:
            prior, losses = ask_base_users(config, world.base, model, devices, world.head)
            use_prompt, use_rows = choose_variants(losses, prior, allowed)
            devices = replace(devices, losses=losses, use_prompt=use_prompt, use_rows=use_rows)
        pay, _ = choose_variants(torch.zeros_like(prior)[None], prior, allowed)
        return replace(state, prior=prior, devices=devices), bool(pay)

    def releases(self, world: World, state: ProtoFedState, slices_ahead: int = 0) -> Ledger:
        """What has left the devices so far, and what the next slices will make leave; nothing where there is no noise.

        The modes without noise carry no claim: new item rows are learned from raw events there, too.
        """
        config = as_run(world.config)
        if config.protofed.mode != "reference":
            return ()
        prototypes, rows = streams_asked(config)
        rounds = state.rounds + slices_ahead * config.privacy.rounds_per_slice
        slices = state.slice_index + slices_ahead
        made = {
            prototypes.name: rounds if uploads_happen(config) else 0,
            rows.name: slices if state.newcomer_noise else 0,
        }
        prototypes = replace(prototypes, noise_multiplier=state.noise_multiplier, rounds=state.allowed_rounds)
        return ledger((prototypes, replace(rows, noise_multiplier=state.newcomer_noise)), made)


def newest_target_of(state: ProtoFedState, slice_: TimeSlice) -> int:
    """The log position of the newest event that was learned from, this slice's included."""
    newest: list[int] = slice_.train_positions[-1:].tolist()
    return max([state.newest_target, *newest])


def choices_of(config: RunConfig, state: ProtoFedState) -> dict[str, int | float]:
    """How many devices use their prompt and their own rows, and how many rows there are."""
    devices = state.devices
    used = {name: float(getattr(devices, name).float().mean()) for name in ("use_prompt", "use_rows")}
    used |= {"just_met": state.just_met} if config.protofed.at_once else {}
    return {**used, "own_rows": len(devices.rows)}


def costs_of(config: RunConfig, state: ProtoFedState, rule: RoundRule) -> dict[str, int | float]:
    """What a client sends and receives in a round, and what learns: prototypes for all, prompts and own rows of each.

    The introductions of new items travel once a slice and are not in the round's bytes.
    """
    backbone, sends = config.backbone, uploads_happen(config)
    per_user = 2 * backbone.prompt_length * backbone.width
    met = max(int(state.devices.met.sum()), 1)
    costs = Costs(
        bytes_up=upload_bytes(rule.upload, rule.trust) if sends else 0,
        bytes_down=tensor_bytes([state.library.v]) if sends else 0,
        trainable_parameters=state.library.v.numel(),
        trainable_parameters_per_user=per_user + len(state.devices.rows) * backbone.width / met,
    )
    return {**costs.diagnostics(), **memory_of(config, state, met)}


def memory_of(config: RunConfig, state: ProtoFedState, met: int) -> dict[str, int | float]:
    """What a client keeps between slices, from shapes: no optimiser state, no activations. Own rows: mean over clients.

    The library counts twice, as it is sent and decoded into prompts; a row counts with the number of its item.
    """
    library, backbone, devices = state.library, config.backbone, state.devices
    return {
        "device_bytes_backbone": module_bytes(state.backbone),
        "device_bytes_encoders": module_bytes(state.codec) + module_bytes(state.g),
        "device_bytes_prototypes": tensor_bytes([library.v])
        + broadcast_bytes(library.n_prototypes, backbone.prompt_length, backbone.width),
        "device_bytes_prompts": tensor_bytes(columns(devices)) // max(len(devices), 1),
        "device_bytes_rows": tensor_bytes([devices.rows.rows, devices.rows.items]) / met,
    }


def schedule_of(config: RunConfig, state: ProtoFedState, slice_: TimeSlice) -> Schedule:
    """Steps and rounds of one slice; rounds end where the budget does."""
    privacy, settings = config.privacy, config.protofed
    left = max(0, state.allowed_rounds - state.rounds)
    rounds = min(privacy.rounds_per_slice, left) if uploads_happen(config) else 0
    if settings.mode == "literal":
        before = (slice_.index - 1) * settings.local_steps
        rounds = (before + settings.local_steps) // PRINTED_PERIOD - before // PRINTED_PERIOD
    return Schedule(
        slice_index=slice_.index,
        steps=local_rule(config).steps,
        rounds=rounds,
        first_round=state.rounds,
        sampling_rate=privacy.sampling_rate,
        chunk=settings.chunk,
        seed=config.seed,
    )


def with_public_rows(
    world: World, state: ProtoFedState, slice_: TimeSlice, descend: Descend
) -> tuple[ProtoFedState, dict[str, Any]]:
    """Public rows of new items: by the shared rule, in the private mode from noised sums or not at all."""
    if as_run(world.config).protofed.mode == "reference":
        return add_new_item_rows(world, state, slice_) if state.newcomer_noise else (state, {})
    before = BackboneState(state.backbone, state.slice_index, state.newest_target)
    after, told = learn_new_rows(world, before, slice_, descend)
    return replace(state, backbone=after.backbone, newest_target=after.newest_target), dict(told)


def add_new_item_rows(world: World, state: ProtoFedState, slice_: TimeSlice) -> tuple[ProtoFedState, dict[str, Any]]:
    """The state with rows for all items after the base block, from the noised introductions of all slices so far."""
    noise = seeded_noise(stream(world.config.seed, "newcomer noise", slice_.index))
    newcomers, backbone, heard = release_introductions(
        state.newcomers, world.backbone, slice_, state.newcomer_noise, noise, SeededDraws(world.config.seed)
    )
    told = {"introduced": int((newcomers.exposures > 0).sum()), "introducing_clients": heard}
    return replace(state, newcomers=newcomers, backbone=backbone), told


def plan_noise(world: World, config: RunConfig) -> tuple[Plan, Float[Tensor, "T f d"]]:
    """The noise of the stream, and the maps from new items' noised sums to rows; none where they are not worth it."""
    prototypes, rows = streams_asked(config)
    rows = replace(rows, share=TOGETHER * (rows.share or 0.0)) if world.beside else rows
    private, nothing = config.protofed.mode == "reference", torch.zeros(0, 1, config.backbone.width)
    without = plan_releases(config.privacy, (prototypes, replace(rows, rounds=0), *world.beside), private=private)[:2]
    told = config.protofed.newcomers == "auto" and world.backbone.content is not None  # content is free
    if told or not may_introduce(config):
        return without, nothing
    plan = plan_releases(config.privacy, (prototypes, rows, *world.beside), private=private)[:2]
    noise, seed = plan[1].noise_multiplier, config.seed
    maps = rehearse_maps(world.backbone, world.base, config.stream.n_slices, noise, seed)
    if config.protofed.newcomers == "noised" or worth_telling(world.backbone, world.base, maps, noise, seed):
        return plan, maps
    return without, nothing


def model_of(world: World, state: ProtoFedState, n_items: int) -> Model:
    """What every device holds alike after a slice, for a catalogue of so many items."""
    codec, g = state.codec, state.g
    assert isinstance(codec, Codec)
    assert isinstance(g, QueryEncoder)
    return Model(
        backbone=state.backbone,
        encoders=Encoders(codec, g, state.gate, state.kappa),
        v=state.library.v,
        prompts=codec.decode(state.library.v),
        rule=local_rule(as_run(world.config)),
        n_items=n_items,
        prior=state.prior,
        met_boost=state.met_boost,
        just_met=state.just_met,
        version=state.library.version,
        # One's own neighbours know better than noise: own rows of new items start without what was told of them.
        first_rows=world.backbone if state.newcomer_noise else None,
    )
