"""What the base block teaches once: base users' prompts on simulated devices, encoders, gate, first prototypes.

All of it comes from the base block, whose events the privacy claim does not cover; afterwards everything shared is
frozen except the prototypes. (The paper calls phi, g and a learnable and trains them nowhere.)
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from protofed.backbone.injection import rescale_like
from protofed.backbone.losses import LOSSES, draw_negatives, window_losses
from protofed.backbone.sasrec import SASRec
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
from protofed.client.drift import fit_gate, fit_kappa, literal_gate, observe
from protofed.client.own_rows import OwnRows, met_boost, no_rows, own_embed, subset, with_met_items, written_back
from protofed.client.prompts import PromptState
from protofed.client.update import Brief, Broadcast, Lesson, LocalRule, client_update, cooled
from protofed.config import RunConfig
from protofed.evaluation.ranking import ndcg, rank_of_positive
from protofed.federation.acceptance import VARIANTS, remembered, validation_questions, variant_losses
from protofed.federation.lessons import ClientData, brief_data, chunks, client_data, negatives_of, stack_size
from protofed.federation.simulator import (
    Encoders,
    broadcast,
    client_stack,
    fresh_moments,
    in_brief,
    keep_stack,
    on,
    query_means,
    rows_of_stack,
    tastes,
)
from protofed.federation.table import ClientTable, drift_of, keep_drift, new_table
from protofed.inference.online import Devices, forced, online_inference
from protofed.privacy.draws import normal
from protofed.progress import Progress
from protofed.seeds import numpy_stream, stream
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
    table: ClientTable
    rows: OwnRows
    met_boost: float
    just_met: float
    prior: Float[
        Tensor, " V"
    ]  # the base users' mean loss of each variant, relative to nothing, times its weight in events
    newest_target: int


def prepare(config: RunConfig, base: TimeSlice, backbone: SASRec, rule: LocalRule, progress: Progress) -> Prepared:
    """Base users learn prompts and own rows on their devices; codec, query encoder, gate and prototypes come of it."""
    settings, device = config.protofed, backbone.items.device
    data = base_data(config, base)
    table, rows, boost = base_devices(config, base, backbone, data, rule, progress)
    codec = fitted_codec(config, backbone, table, data)
    g = fitted_query_encoder(config, backbone, codec, table, rows, data)
    encoders = observed(config, base, backbone, codec, g, table, rows)
    library = first_library(config, base.past.n_users, codec.encode(table.long[data.users].to(device)))
    newest = int(data.windows.newest.max()) if len(data) else -1
    started = Prepared(encoders, library, table, rows, boost, 0.0, torch.zeros(len(VARIANTS), device=device), newest)
    if settings.at_once and rule.use_rows:
        started = replace(started, just_met=fitted_just_met(config, base, backbone, rule, started))
    return started if "acceptance" in settings.ablate else with_prior(config, base, backbone, rule, started)


def base_data(config: RunConfig, base: TimeSlice) -> ClientData:
    """The newest windows of every base user, with a context that may be shorter than the backbone's."""
    length = min(config.protofed.base_history or config.backbone.history_length, config.backbone.history_length)
    return client_data(
        base.past,
        base.train_positions,
        length=length,
        stride=min(config.training.stride, max(1, length - 1)),
        rng=numpy_stream(config.seed, "base windows"),
        newest=config.protofed.base_windows,
    )


def base_brief(config: RunConfig, base: TimeSlice, data: ClientData) -> ClientData | None:
    """About as many newest events of every base user as `base_data` has, with the context that prompts learn beside."""
    settings, stride = config.protofed, config.training.stride
    length = settings.prompt_history
    return brief_data(
        data,
        base.past,
        base.train_positions,
        length=length,
        rng=numpy_stream(config.seed, "brief base windows"),
        newest=-(-settings.base_windows * stride // max(1, length - 1)),
    )


def base_devices(
    config: RunConfig, base: TimeSlice, backbone: SASRec, data: ClientData, rule: LocalRule, progress: Progress
) -> tuple[ClientTable, OwnRows, float]:
    """Every base user's long prompt and own rows after some local steps from one common prompt, and the rows' boost."""
    settings, shape = config.protofed, (config.backbone.prompt_length, config.backbone.width)
    device = backbone.items.device
    where_kept = device if settings.table == "device" else torch.device("cpu")
    table = new_table(base.past.n_users, *shape, settings.embedding, device=where_kept)
    one = torch.zeros(1, dtype=torch.int64)
    table.long[data.users.to(where_kept)] = FIRST_STD * normal(config.seed, "first prompt", one, 0, shape).to(
        table.long
    )
    table.met[data.users.to(where_kept)] = True
    own = no_rows(shape[1], device=where_kept)
    if rule.use_rows:
        own = with_met_items(own, backbone, base.past, base.bounds[-1].train_end, data.users)
    alone = LocalRule(
        loss=rule.loss,
        eta_l=rule.eta_l,
        eta_r=rule.eta_r,
        use_rows=rule.use_rows,
        use_short=False,
        use_prototypes=False,
        align=False,
        bf16=rule.bf16,
    )
    rows, place = subset(own, data.users.to(own.clients.device))
    moments = fresh_moments(table, data, rows)
    shared = nobody_yet(backbone, *shape, settings.embedding)
    brief = base_brief(config, base, data)
    size = stack_size(settings.chunk, backbone.items)
    briefs = in_brief(brief, -(-len(data) // size), size)
    for step in range(settings.base_steps):

        def draw(windows: Windows, step: int = step) -> Int[Tensor, "W n"]:
            return negatives_of(windows, config.training.negatives, base.n_train_items, seed=config.seed, step=step)

        for (where, windows), short in zip(chunks(data, size, device), briefs, strict=True):
            n = where.stop - where.start
            lesson = Lesson(windows, shared.v.expand(n, -1), *torch.zeros(2, n, device=device))
            state = client_stack(table, data, rows, moments, where, device)
            told = None if short is None else Brief(moved(short, device), draw(short).to(device))
            state, _ = client_update(
                shared, state, lesson, draw(windows), cooled(alone, step, settings.base_steps), told
            )
            keep_stack(table, data, rows, moments, where, state)
        progress("base devices", step + 1, settings.base_steps, "")
    learned = written_back(own, place, rows)
    taste = torch.zeros(len(table), shape[1], device=where_kept)
    taste[data.users.to(where_kept)] = tastes(backbone, own, data, settings.chunk).to(taste)
    return table, learned, settings.met_boost * met_boost(own, learned, taste)


def nobody_yet(backbone: SASRec, prompt_length: int, d: int, d_z: int) -> Broadcast:
    """A broadcast before there are prototypes: one that nobody is routed to."""
    codec = random_linear_codec(prompt_length, d, stream(0, "nobody"), d_z=d_z).to(backbone.items.device)
    v = torch.zeros(1, d_z, device=backbone.items.device)
    v[:, 0] = 1.0
    return broadcast(backbone, codec, v)


def fitted_codec(config: RunConfig, backbone: SASRec, table: ClientTable, data: ClientData) -> Codec:
    """phi and Dec on the base users' prompts: linear by principal directions, or the paper's MLP."""
    settings, device = config.protofed, backbone.items.device
    prompts = table.long[data.users.to(table.device)].to(device)
    kind = settings.codec
    if kind == "auto":
        kind = "linear" if len(data) < LINEAR_BELOW else "mlp"
    rng = stream(config.seed, "codec")
    if kind == "linear" or len(prompts) < 2:
        return pca_codec(prompts, rng, d_z=settings.embedding).to(device)
    codec = MlpCodec(prompts.shape[1], prompts.shape[2], rng, d_z=settings.embedding).to(device)
    return train_codec(codec, prompts, rng, how=CodecTraining(), rec_loss=recommending(config, backbone, data))[0]


def recommending(config: RunConfig, backbone: SASRec, data: ClientData) -> RecLoss:
    """The recommendation loss of decoded prompts on the newest window of the base users they stand for."""
    device, rng = backbone.items.device, stream(config.seed, "codec negatives")
    newest = data.starts[1:] - 1

    def rec_loss(decoded: Tensor, batch: Tensor) -> Tensor:
        windows = moved(trimmed(take(data.windows, newest[batch.cpu()])), device)
        drawn = draw_negatives(len(windows), config.training.negatives, backbone.n_rows, rng).to(device)
        prompt = rescale_like(decoded, backbone.input_norm())
        sums, counts = window_losses(backbone, windows, drawn, LOSSES[config.training.loss], prompt)
        return sums.sum() / counts.sum().clamp(min=1)

    return rec_loss


@torch.no_grad()
def newest_hidden(config: RunConfig, backbone: SASRec, rows: OwnRows, data: ClientData) -> Float[Tensor, "A d"]:
    """The backbone's hidden state at the newest query of every base user."""
    parts = []
    active, _ = subset(rows, data.users.to(rows.clients.device))
    device = backbone.items.device
    for where, windows in chunks(data, stack_size(config.protofed.chunk, backbone.items), device):
        last = torch.cat([windows.users.diff() != 0, torch.ones_like(windows.users[:1], dtype=torch.bool)])
        newest = take(windows, last.nonzero()[:, 0])
        own, _ = rows_of_stack(active, where)
        embed = own_embed(on(own, backbone.items.device), newest.users, backbone.embed)
        parts.append(backbone.last_hidden(newest.tokens, None, embed))
    return torch.cat([torch.zeros(0, config.backbone.width, device=backbone.items.device), *parts])


def fitted_query_encoder(
    config: RunConfig, backbone: SASRec, codec: Codec, table: ClientTable, rows: OwnRows, data: ClientData
) -> QueryEncoder:
    """g, trained to send a base user's newest query near the user's own prompt."""
    device, rng = backbone.items.device, stream(config.seed, "query encoder")
    g = QueryEncoder(config.backbone.width, rng, d_z=config.protofed.embedding).to(device)
    if len(data) < 2:
        return g.requires_grad_(False)
    z = codec.encode(table.long[data.users.to(table.device)].to(device))
    return train_query_encoder(g, newest_hidden(config, backbone, rows, data), z, rng, how=CodecTraining())[0]


def observed(
    config: RunConfig,
    base: TimeSlice,
    backbone: SASRec,
    codec: Codec,
    g: QueryEncoder,
    table: ClientTable,
    rows: OwnRows,
) -> Encoders:
    """The encoders with a gate and kappa fitted to how base users' queries drift between eight parts of the block."""
    device = backbone.items.device
    for part in np.array_split(base.train_positions, PERIODS):
        data = client_data(
            base.past,
            part,
            length=config.backbone.history_length,
            stride=config.training.stride,
            rng=numpy_stream(config.seed, "base periods"),
        )
        active, _ = subset(rows, data.users.to(rows.clients.device))
        for where, windows in chunks(data, stack_size(config.protofed.chunk, backbone.items), device):
            users = data.users[where]
            own, _ = rows_of_stack(active, where)
            h = query_means(backbone, g, on(own, device), windows, len(users))
            keep_drift(table, users, observe(drift_of(table, users, device), h))
    everybody = drift_of(table, torch.arange(len(table)), device)
    moving = everybody.periods > 1
    gate = literal_gate() if config.protofed.mode == "literal" else fit_gate(everybody.drift[moving])
    gate = type(gate)(*(getattr(gate, name).to(device) for name in ("centre", "spread", "slope", "bias")))
    return Encoders(codec, g, gate, fit_kappa(everybody.mean_drift[moving]))


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


def with_prior(config: RunConfig, base: TimeSlice, backbone: SASRec, rule: LocalRule, start: Prepared) -> Prepared:
    """The same with what the base block's validation events say about prompts and own rows, by user and in the mean."""
    shared = broadcast(backbone, start.encoders.codec, start.library.v)
    devices = everybody_uses(start.table, start.rows, backbone.items.device, start.just_met)
    encoders = start.encoders
    losses, users = variant_losses(
        shared, encoders.g, encoders.gate, rule, devices, base, config.backbone.history_length
    )
    if not len(losses):
        return start
    at = start.table.device
    start.table.losses.copy_(remembered(start.table.losses, losses.to(at), users.to(at)))
    prior = config.protofed.acceptance_prior * torch.nan_to_num(losses - losses[:, :1]).mean(0)
    return replace(start, prior=prior)


@torch.no_grad()
def fitted_just_met(config: RunConfig, base: TimeSlice, backbone: SASRec, rule: LocalRule, start: Prepared) -> float:
    """What having met an item is worth where there is no row for it: the strength with the best validation NDCG@10.

    Asked of the base block's validation events, as if nobody had a row or a prompt: all repeats among them tell, and
    not only those of items met since the train part. Among all items, because sampled candidates hardly ever hold
    something else that was met, and would like it as strong as can be. Two passes tell all: scores are linear in it.
    """
    shared = broadcast(backbone, start.encoders.codec, start.library.v)
    strengths = torch.tensor(STRENGTHS, device=backbone.items.device)
    nobodys = no_rows(config.backbone.width, device=strengths.device)
    counted = forced(everybody_uses(start.table, nobodys, strengths.device, 1.0), prompt=False, rows=True)
    worth = torch.zeros(len(STRENGTHS), dtype=torch.float64)
    for queries, positives, _ in validation_questions(base, config.backbone.history_length, strengths.device):
        bare, met = (
            online_inference(shared, start.encoders.g, start.encoders.gate, rule, replace(counted, just_met=b), queries)
            for b in (0.0, 1.0)
        )
        ranks = (rank_of_positive(bare + b * (met - bare), positives) for b in strengths)
        worth += torch.stack([ndcg(rank, 10).sum() for rank in ranks]).cpu()
    return STRENGTHS[int(worth.argmax())]


def everybody_uses(table: ClientTable, rows: OwnRows, device: torch.device, just_met: float) -> Devices:
    """The table as ranking reads it, with everything switched on."""
    everybody = torch.ones(len(table), dtype=torch.bool, device=device)
    drift: Tensor = table.step.to(device).norm(dim=-1)
    prompts = PromptState(table.long.to(device), table.short.to(device))
    return Devices(prompts, drift, table.met.to(device), on(rows, device), everybody, everybody, True, True, just_met)
