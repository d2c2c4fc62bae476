"""What the base block teaches once: base users' prompts on simulated devices, encoders, gate, first prototypes.

All of it comes from the base block, whose events the privacy claim does not cover; afterwards everything shared is
frozen except the prototypes. (The paper calls phi, g and a learnable and trains them nowhere.)
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from protofed.backbone.injection import rescale_like
from protofed.backbone.losses import LOSSES, draw_negatives, window_losses
from protofed.backbone.sasrec import SASRec
from protofed.client.begin import query_means
from protofed.client.codec import (
    Codec,
    CodecTraining,
    MlpCodec,
    QueryEncoder,
    RecLoss,
    pca_codec,
    random_linear_codec,
    train_codec,
    train_query_encoder,
)
from protofed.client.drift import DriftState, fit_gate, fit_kappa, literal_gate, observe
from protofed.client.lessons import CutsByKey, Lesson, own_windows, stack_size
from protofed.client.memory import as_histories, events_between, events_until, places_since
from protofed.client.model import VARIANTS, Encoders, LocalRule, Model
from protofed.client.own_rows import met_boost, no_rows, own_embed, with_met_items
from protofed.client.state import (
    DeviceState,
    choose_variants,
    new_devices,
    remember,
    select,
    to_device,
    with_fresh_moments,
)
from protofed.config import RunConfig
from protofed.evaluation.ranking import ndcg, rank_of_positive
from protofed.federation.simulator import Schedule, Stack, put_stacks, step_stacks
from protofed.inference.end import record_losses, validation_questions, variant_losses
from protofed.inference.head import FittedHead
from protofed.inference.online import online_inference
from protofed.privacy.draws import SeededDraws
from protofed.progress import Progress
from protofed.seeds import stream
from protofed.server.library import PrototypeLibrary, check_cohort, default_prototypes, new_library
from protofed.server.seeding import spherical_kmeans
from protofed.server.separation import enforce_separation
from protofed.slices.stream import TimeSlice
from protofed.slices.windows import Windows, moved, take, trimmed

PERIODS = 8  # the base block is as long as eight slices
LINEAR_BELOW = 2_000  # base users
FIRST_STD = 0.02  # of the one random prompt every base user starts from
STRENGTHS = (0.0, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56)  # tried for items just met


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything ProtoFed-SP starts slice 1 with."""

    encoders: Encoders
    library: PrototypeLibrary
    devices: DeviceState
    met_boost: float
    just_met: float
    prior: Float[
        Tensor, " V"
    ]  # the base users' mean loss of each variant, relative to nothing, times its weight in events

    def model(self, backbone: SASRec, rule: LocalRule, n_items: int) -> Model:
        """What devices hold once the base block has been learned."""
        codec, v = self.encoders.codec, self.library.v
        return Model(
            backbone, self.encoders, v, codec.decode(v), rule, n_items, self.prior, self.met_boost, self.just_met
        )


def prepare(config: RunConfig, base: TimeSlice, backbone: SASRec, rule: LocalRule, progress: Progress) -> Prepared:
    """Base users learn prompts and own rows on their devices; codec, query encoder, gate and prototypes come of it."""
    settings, device = config.protofed, backbone.items.device
    devices, boost = teach_base_devices(config, base, backbone, rule, progress)
    learned = devices.met.nonzero()[:, 0]
    progress("codec and query encoder", 0, None)
    prompts = devices.prompts.long[learned].to(device)
    windows = base_windows(config, select(devices, learned))
    codec = fit_codec(config, backbone, prompts, windows)
    g = fit_query_encoder(config, backbone, codec.encode(prompts), to_device(select(devices, learned), device), windows)
    progress("drift", 0, None)
    drift, encoders = observe_base_drift(config, base, backbone, codec, g, devices)
    devices = replace(devices, drift=drift)
    progress("first prototypes", 0, None)
    library = first_library(config, base.past.n_users, codec.encode(prompts))
    prior = torch.zeros(len(VARIANTS), device=device)
    made = Prepared(encoders, library, devices, boost, 0.0, prior)
    if settings.at_once and rule.use_rows:
        made = replace(made, just_met=fit_just_met(base, made.model(backbone, rule, base.n_train_items), devices))
    progress("what prompts and rows are worth", 0, None)
    made = made if "acceptance" in settings.ablate else with_prior(config, base, backbone, rule, made)
    use_prompt, use_rows = choose_variants(made.devices.losses, made.prior, rule.allowed)
    return replace(made, devices=replace(made.devices, use_prompt=use_prompt, use_rows=use_rows))


def base_devices(config: RunConfig, base: TimeSlice, device: torch.device) -> DeviceState:
    """A device for every user of the base block, with the train part in its memory and one common first prompt."""
    shape = (config.backbone.prompt_length, config.backbone.width)
    keys = torch.from_numpy(base.user_keys)
    state = new_devices(keys, *shape, config.protofed.embedding, device=device)
    past, everybody = base.past, torch.arange(len(state))
    until = events_until(past, base.bounds[-1].train_end)
    state = remember(state, events_between(past, everybody, torch.zeros_like(until), until))
    first = FIRST_STD * SeededDraws(config.seed).normal("first prompt", torch.zeros_like(keys[:1]), 0, shape)
    met = (until > 0).to(device)
    long = torch.where(met[:, None, None], first.to(state.prompts.long), state.prompts.long)
    return replace(state, prompts=replace(state.prompts, long=long), met=met)


def base_windows(config: RunConfig, devices: DeviceState) -> Windows:
    """The newest windows of each base user, with a context that may be shorter than the backbone's."""
    length = min(config.protofed.base_history or config.backbone.history_length, config.backbone.history_length)
    stride = min(config.training.stride, max(1, length - 1))
    return newest_windows(config, devices, "base windows", length, stride, config.protofed.base_windows)


def brief_base_windows(config: RunConfig, devices: DeviceState) -> Windows | None:
    """About as many newest events of each base user, with the context that prompts learn beside; None for none."""
    settings, length = config.protofed, config.protofed.prompt_history
    if not length:
        return None
    stride = max(1, length - 1)
    newest = -(-settings.base_windows * config.training.stride // stride)
    return newest_windows(config, devices, "brief base windows", length, stride, newest)


def newest_windows(
    config: RunConfig, devices: DeviceState, purpose: str, length: int, stride: int, newest: int
) -> Windows:
    """So many of the newest windows over all that each device remembers."""
    past = as_histories(devices.memory, row_order=config.stream.row_order_history)
    cuts = CutsByKey(SeededDraws(config.seed), purpose, devices.users, 0)
    every = np.arange(len(devices.memory.items))
    return trimmed(own_windows(past, every, cuts, length=length, stride=stride, newest=newest))


def teach_base_devices(
    config: RunConfig, base: TimeSlice, backbone: SASRec, rule: LocalRule, progress: Progress
) -> tuple[DeviceState, float]:
    """Every base user's device after some local steps from one common prompt, and what rows gained by them."""
    settings, at = config.protofed, backbone.items.device
    devices = base_devices(config, base, at if settings.table == "device" else torch.device("cpu"))
    learners = devices.met.nonzero()[:, 0].cpu()
    if rule.use_rows:
        past = as_histories(devices.memory, row_order=config.stream.row_order_history)
        devices = replace(devices, rows=with_met_items(devices.rows, backbone, past, len(past), learners))
    model = nobody_yet(config, backbone, rule, base.n_train_items)
    stacks = list(base_stacks(config, model, devices, learners))
    schedule = Schedule(0, settings.base_steps, 0, 0, config.privacy.sampling_rate, settings.chunk, config.seed)
    for step in range(settings.base_steps):
        stacks, _ = step_stacks(model, stacks, schedule, step)
        note = f"base devices, step {step + 1} of {settings.base_steps}"
        progress("base devices", step + 1, settings.base_steps, note)
    learned = put_stacks(devices, stacks)
    boost = settings.met_boost * met_boost(devices.rows, learned.rows, learned.taste)
    return replace(learned, active=torch.zeros_like(learned.active)), boost


def base_stacks(config: RunConfig, model: Model, devices: DeviceState, learners: Int[Tensor, " n"]) -> Iterator[Stack]:
    """The base users' devices with their lessons: no query, no gate, no pull, for there are no prototypes yet."""
    at = model.v.device
    for places in learners.split(stack_size(config.protofed.chunk, model.backbone.items)):
        state = to_device(select(devices, places), at)
        windows, n = base_windows(config, state), len(state)
        taste = query_means(model.backbone, None, state.rows, moved(windows, at), n)
        begun = with_fresh_moments(replace(state, taste=taste, active=torch.ones_like(state.active)))
        nothing = torch.zeros(n, device=at)
        brief = brief_base_windows(config, state)
        lesson = Lesson(windows, model.v.expand(n, -1), nothing, nothing, brief=brief)
        yield Stack(places, to_device(begun, devices.device), lesson)


def nobody_yet(config: RunConfig, backbone: SASRec, rule: LocalRule, n_items: int) -> Model:
    """The model of base users' devices: without prototypes, encoders or a pull, prompts and rows learn alone."""
    shape, d_z, at = (config.backbone.prompt_length, config.backbone.width), config.protofed.embedding, backbone.items
    codec = random_linear_codec(*shape, stream(0, "nobody"), d_z=d_z).to(at.device)
    g = QueryEncoder(shape[1], stream(0, "nobody"), d_z=d_z).to(at.device).requires_grad_(False)
    v = torch.zeros(1, d_z, device=at.device)
    v[:, 0] = 1.0
    alone = LocalRule(
        loss=rule.loss, eta_l=rule.eta_l, eta_r=rule.eta_r, use_rows=rule.use_rows, use_short=False,
        use_prototypes=False, align=False, bf16=rule.bf16, steps=config.protofed.base_steps, negatives=rule.negatives,
    )  # fmt: skip
    encoders = Encoders(codec, g, literal_gate(), 0.0)
    prior = torch.zeros(len(VARIANTS), device=at.device)
    return Model(backbone, encoders, v, codec.decode(v), alone, n_items, prior)


def fit_codec(config: RunConfig, backbone: SASRec, prompts: Float[Tensor, "n L_p d"], windows: Windows) -> Codec:
    """phi and Dec on the base users' prompts: linear by principal directions, or the paper's MLP."""
    settings, device = config.protofed, backbone.items.device
    kind = settings.codec
    if kind == "auto":
        kind = "linear" if len(prompts) < LINEAR_BELOW else "mlp"
    rng = stream(config.seed, "codec")
    if kind == "linear" or len(prompts) < 2:
        return pca_codec(prompts, rng, d_z=settings.embedding).to(device)
    codec = MlpCodec(prompts.shape[1], prompts.shape[2], rng, d_z=settings.embedding).to(device)
    return train_codec(codec, prompts, rng, how=CodecTraining(), rec_loss=make_rec_loss(config, backbone, windows))[0]


def newest_of(windows: Windows) -> Windows:
    """Each user's newest window; windows are sorted by user and age."""
    last = torch.cat([windows.users.diff() != 0, torch.ones_like(windows.users[:1], dtype=torch.bool)])
    return take(windows, last.nonzero()[:, 0])


def make_rec_loss(config: RunConfig, backbone: SASRec, windows: Windows) -> RecLoss:
    """The recommendation loss of decoded prompts on the newest window of the base users they stand for."""
    device, rng, newest = backbone.items.device, stream(config.seed, "codec negatives"), newest_of(windows)

    def rec_loss(decoded: Tensor, batch: Tensor) -> Tensor:
        chosen = moved(trimmed(take(newest, batch.cpu())), device)
        drawn = draw_negatives(len(chosen), config.training.negatives, backbone.n_rows, rng).to(device)
        prompt = rescale_like(decoded, backbone.input_norm())
        sums, counts = window_losses(backbone, chosen, drawn, LOSSES[config.training.loss], prompt)
        return sums.sum() / counts.sum().clamp(min=1)

    return rec_loss


@torch.no_grad()
def newest_hidden(config: RunConfig, backbone: SASRec, devices: DeviceState, windows: Windows) -> Float[Tensor, "A d"]:
    """The backbone's hidden state at the newest query of every base user."""
    newest, device = newest_of(windows), backbone.items.device
    parts = [torch.zeros(0, config.backbone.width, device=device)]
    for places in torch.arange(len(newest)).split(stack_size(config.protofed.chunk, backbone.items)):
        some = moved(trimmed(take(newest, places)), device)
        parts.append(backbone.last_hidden(some.tokens, None, own_embed(devices.rows, some.users, backbone.embed)))
    return torch.cat(parts)


def fit_query_encoder(
    config: RunConfig, backbone: SASRec, z: Float[Tensor, "n d_z"], devices: DeviceState, windows: Windows
) -> QueryEncoder:
    """g, trained to send a base user's newest query near the user's own prompt."""
    device, rng = backbone.items.device, stream(config.seed, "query encoder")
    g = QueryEncoder(config.backbone.width, rng, d_z=config.protofed.embedding).to(device)
    if len(devices) < 2:
        return g.requires_grad_(False)
    hidden = newest_hidden(config, backbone, devices, windows)
    return train_query_encoder(g, hidden, z, rng, how=CodecTraining())[0]


def observe_base_drift(
    config: RunConfig, base: TimeSlice, backbone: SASRec, codec: Codec, g: QueryEncoder, devices: DeviceState
) -> tuple[DriftState, Encoders]:
    """How base users' queries drift between eight parts of the block, and encoders whose gate and kappa fit that."""
    device, drift = backbone.items.device, devices.drift
    for period, part in enumerate(np.array_split(base.train_positions, PERIODS)):
        if not len(part):
            continue
        for places in active_between(base, part).split(stack_size(config.protofed.chunk, backbone.items)):
            state = to_device(select(devices, places), device)
            windows = period_windows(config, base, state, places, part, period)
            h = query_means(backbone, g, state.rows, moved(windows, device), len(state))
            drift = observe_some(drift, places, h)
    moving = drift.periods > 1
    gate = literal_gate() if config.protofed.mode == "literal" else fit_gate(drift.drift[moving])
    gate = type(gate)(*(getattr(gate, name).to(device) for name in ("centre", "spread", "slope", "bias")))
    return drift, Encoders(codec, g, gate, fit_kappa(drift.mean_drift[moving]))


def active_between(base: TimeSlice, part: np.ndarray) -> Int[Tensor, " n"]:
    """Who has an event at these log positions."""
    return torch.from_numpy(np.unique(base.past.users[part]).astype(np.int64))


def period_windows(
    config: RunConfig, base: TimeSlice, state: DeviceState, places: Int[Tensor, " n"], part: np.ndarray, period: int
) -> Windows:
    """The windows of these devices over what they did in one part of the base block."""
    past = as_histories(state.memory, row_order=config.stream.row_order_history)
    first, end = (events_until(base.past, int(edge))[places] for edge in (part[0], part[-1] + 1))
    later = places_since(state.memory, end)
    targets = np.setdiff1d(places_since(state.memory, first), later, assume_unique=True)
    cuts = CutsByKey(SeededDraws(config.seed), "base periods", state.users, period)
    length, stride = config.backbone.history_length, config.training.stride
    return trimmed(own_windows(past, targets, cuts, length=length, stride=stride))


def observe_some(drift: DriftState, places: Int[Tensor, " n"], h: Float[Tensor, "n d_z"]) -> DriftState:
    """The drift of all devices after one more period of some of them."""
    at = places.to(drift.mean.device)
    columns = (drift.mean, drift.step, drift.total, drift.periods)
    after = observe(DriftState(*(column[at] for column in columns)), h.to(drift.mean))
    news = (after.mean, after.step, after.total, after.periods)
    return DriftState(*(column.index_copy(0, at, new) for column, new in zip(columns, news, strict=True)))


def first_library(config: RunConfig, n_clients: int, z: Float[Tensor, "n d_z"]) -> PrototypeLibrary:
    """K prototypes at the clusters of the base users' embeddings, kept apart."""
    settings, rate = config.protofed, config.privacy.sampling_rate
    k = settings.prototypes or default_prototypes(rate, n_clients)
    if settings.mode == "reference":
        check_cohort(k, rate, n_clients)
    rng = stream(config.seed, "prototypes")
    v = spherical_kmeans(z, k, rng, starts=settings.seedings)
    v = enforce_separation(v, settings.margin, rng) if settings.margin else v
    return new_library(v, max(rate * n_clients / k, 1.0))


def with_prior(config: RunConfig, base: TimeSlice, backbone: SASRec, rule: LocalRule, made: Prepared) -> Prepared:
    """The same with what the base block's validation events say about prompts and own rows, by user and in the mean."""
    model = made.model(backbone, rule, base.n_train_items)
    prior, evidence = ask_base_users(config, base, model, made.devices)
    return replace(made, prior=prior, devices=replace(made.devices, losses=evidence))


def ask_base_users(
    config: RunConfig, base: TimeSlice, model: Model, devices: DeviceState, head: FittedHead | None = None
) -> tuple[Float[Tensor, " V"], Float[Tensor, "U V"]]:
    """The base users' verdict on the variants, as a prior, and each device's own evidence; under a head, if given."""
    at = model.v.device
    validation = validation_questions(base, config.backbone.history_length, at)
    losses, users = variant_losses(model, to_device(devices, at), validation, head)
    nothing = torch.zeros_like(devices.losses)
    if not len(losses):
        return torch.zeros_like(model.prior), nothing
    prior = config.protofed.acceptance_prior * torch.nan_to_num(losses - losses[:, :1]).mean(0)
    return prior, record_losses(nothing, losses.to(nothing.device), users.to(nothing.device))


@torch.no_grad()
def fit_just_met(base: TimeSlice, model: Model, devices: DeviceState) -> float:
    """What having met an item is worth where there is no row for it: the strength with the best validation NDCG@10.

    Asked of the base block's validation events, as if nobody had a row or a prompt: all repeats among them tell, and
    not only those of items met since the train part. Among all items, because sampled candidates hardly ever hold
    something else that was met, and would like it as strong as can be. Two passes tell all: scores are linear in it.
    """
    at = model.v.device
    strengths = torch.tensor(STRENGTHS, device=at)
    nobodys = replace(to_device(devices, at), rows=no_rows(model.backbone.config.width, device=at))
    worth = torch.zeros(len(STRENGTHS), dtype=torch.float64)
    for asked in validation_questions(base, model.backbone.config.history_length, at):
        bare, met = (
            online_inference(replace(model, just_met=b), nobodys, asked.queries, variant=(False, True))
            for b in (0.0, 1.0)
        )
        ranks = (rank_of_positive(bare + b * (met - bare), asked.positives) for b in strengths)
        worth += torch.stack([ndcg(rank, 10).sum() for rank in ranks]).cpu()
    return STRENGTHS[int(worth.argmax())]
