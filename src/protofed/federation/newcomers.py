"""The items that came after the base block: rehearsed on the base block, then introduced once a slice under noise.

The rehearsal also says whether it is worth its ε: where too few people meet too many new items, it is not.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from protofed.backbone.sasrec import SASRec, at_rest, grown
from protofed.backbone.validation import exam_of, grade_exam
from protofed.client.introductions import ItemUpload, Map, introductions, make_item_upload, map_of
from protofed.privacy.draws import Draws
from protofed.privacy.mechanism import Noise, seeded_noise
from protofed.seeds import stream
from protofed.server.accept import accept_items
from protofed.server.newcomers import fit_map, predict_rows, row_features, sum_introductions
from protofed.slices.stream import TimeSlice

FOLDS = 5
PARTS = 8  # the base block is as long as eight slices
GIVEN_BACK = 0.1  # share of a learned row's worth that makes a told one worth its ε
DEALS = 4  # of the arrivals' sums to each other
RARE = 0.1  # weight of an item that the rehearsal's events never met


@dataclass(frozen=True, slots=True)
class Newcomers:
    """Noised sums of all slices so far for every item, how many were added up for it, and the maps to rows."""

    sums: Float[Tensor, "I r1"]
    exposures: Int[Tensor, " I"]
    maps: Float[Tensor, "T f d"]


def nobody_new(maps: Float[Tensor, "T f d"]) -> Newcomers:
    """Before the first slice."""
    return Newcomers(torch.zeros(0, maps.shape[1] - 1), torch.zeros(0, dtype=torch.int64), maps)


def rehearse_maps(public: SASRec, base: TimeSlice, n_slices: int, std: float, seed: int) -> Float[Tensor, "T f d"]:
    """For 1, 2, ... slices of introductions, the map from their noised sums to rows, learned on the base block."""
    known = public.items.detach().cpu()[public.has_row.cpu()]
    on, noise = map_of(known), seeded_noise(stream(seed, "rehearsal"))
    return torch.stack([_rehearse_map(public, base, on, t, std, noise) for t in range(1, n_slices + 1)])


def _rehearse_map(
    public: SASRec, base: TimeSlice, on: Map, slices: int, std: float, noise: Noise
) -> Float[Tensor, "f d"]:
    """Every fifth item in turn is introduced by the base block's last `slices` eighths."""
    part = max(1, len(base.train_positions) // PARTS)
    events = base.train_positions[-part * min(slices, PARTS) :]
    has_row, rows = public.has_row.cpu(), public.items.detach().cpu()
    met = torch.bincount(torch.from_numpy(base.past.items[base.past.place[events]]), minlength=len(rows))
    seen, targets, weights = [], [], []
    for fold in range(FOLDS):
        pretend = has_row & (torch.arange(len(rows)) % FOLDS == fold)
        said = introductions(base.past, events, base.bounds[-1].train_end, public, on, pretend)
        sums = sum_introductions(said, pretend, std * float(np.sqrt(slices)), noise)
        seen.append(row_features(sums[pretend]))
        targets.append(rows[pretend] - on.mean)
        weights.append(met[pretend] + RARE)
    return fit_map(torch.cat(seen), torch.cat(targets), torch.cat(weights))


def worth_telling(public: SASRec, base: TimeSlice, maps: Float[Tensor, "T f d"], std: float, seed: int) -> bool:
    """Whether predicted rows recover a tenth of what learned rows gain, without loss on other items.

    The items that arrived in the block's second half (or in fewer eighths, where the stream has fewer slices) play
    newcomers: their rows are taken away, then told from that half's noised introductions, and the validation events are
    ranked. What counts is how much better they do than with each other's sums, dealt four times: any row beats one that
    all share. All of it is the base block's, so the answer costs no ε.
    """
    slices = min(PARTS // 2, len(maps))
    events = base.train_positions[-max(1, len(base.train_positions) * slices // PARTS) :]
    has_row = public.has_row.cpu()
    arrived = has_row & ~items_met_before(base, int(events[0]), public.n_rows)
    learned = accuracy_on(public, base, arrived)[0]
    if arrived.equal(has_row) or not learned:
        return False
    hidden = grown(public, public.n_rows)
    hidden.has_row = (has_row & ~arrived).to(public.items.device)
    hidden.refresh_mean_row()
    on, rng = map_of(public.items.detach().cpu()[has_row & ~arrived]), stream(seed, "arrivals")
    said = introductions(base.past, events, base.bounds[-1].train_end, public, on, arrived)
    sums, exposures = (
        sum_introductions(said, arrived, std * float(np.sqrt(slices)), seeded_noise(rng)),
        slices * arrived.long(),
    )

    def accuracy(order: Tensor) -> tuple[float, float]:
        dealt = sums.index_put((arrived,), sums[arrived][order])
        return accuracy_on(
            with_predicted_rows(hidden, Newcomers(dealt, exposures, maps), arrived, on.mean), base, arrived
        )

    n = int(arrived.sum())
    told, after = accuracy(torch.arange(n))
    by_chance = max(accuracy(torch.randperm(n, generator=rng))[0] for _ in range(DEALS))
    return told - by_chance >= GIVEN_BACK * learned and after >= accuracy_on(hidden, base, arrived)[1]


def accuracy_on(model: SASRec, base: TimeSlice, wanted: Bool[Tensor, " I"]) -> tuple[float, float]:
    """Mean NDCG@10 over the validation events on these items (0 where there are none), and over all."""
    exam = exam_of(base, "sampled", model.config.history_length, model.items.device)
    values, positives = grade_exam(model, exam), base.validation.positives[torch.from_numpy(exam.order)]
    among = (positives < len(wanted)) & wanted[positives.clamp(max=len(wanted) - 1)]
    return (float(values[among].mean()) if among.any() else 0.0), float(values.sum()) / max(len(values), 1)


def items_met_before(base: TimeSlice, position: int, n_items: int) -> Bool[Tensor, " I"]:
    """Which items had an event before that log position."""
    earlier = base.past.items[base.past.place[np.arange(position)]]
    return torch.bincount(torch.from_numpy(earlier), minlength=n_items)[:n_items] > 0


def without_base_row(public: SASRec, n_items: int) -> Bool[Tensor, " I"]:
    """Which items of the catalogue the base block did not teach."""
    new = torch.ones(n_items, dtype=torch.bool)
    new[: public.n_rows] = ~public.has_row.cpu()[:n_items]
    return new


def release_introductions(
    state: Newcomers, public: SASRec, slice_: TimeSlice, std: float, noise: Noise, draws: Draws
) -> tuple[Newcomers, SASRec, int]:
    """One release: sums with this slice's in them, the public backbone with a row for every newcomer, who was heard."""
    wanted = without_base_row(public, slice_.n_train_items)
    state, heard = add_introductions(state, [introduce(public, slice_, draws)], wanted, slice_.index, std, noise)
    return state, with_predicted_rows(public, state, wanted, mean_of(public)), heard


def introduce(public: SASRec, slice_: TimeSlice, draws: Draws) -> ItemUpload:
    """What devices say of the items that the base block did not teach, from what they met in the slice."""
    on, wanted = map_of(known_rows(public)), without_base_row(public, slice_.n_train_items)
    said = introductions(slice_.past, slice_.train_positions, slice_.bounds[-1].train_end, public, on, wanted)
    return make_item_upload(said, torch.from_numpy(slice_.user_keys), draws, slice_.index)[0]


def add_introductions(
    state: Newcomers, uploads: Iterable[ItemUpload], wanted: Bool[Tensor, " I"], index: int, std: float, noise: Noise
) -> tuple[Newcomers, int]:
    """The noised sums with those of one more slice in them, and how many devices were heard."""
    accepted, _ = accept_items(uploads, slice_index=index, n_items=len(wanted), width=state.maps.shape[1] - 1)
    sums, exposures = sum_introductions(accepted, wanted, std, noise), wanted.long()
    sums[: len(state.sums)] += state.sums
    exposures[: len(state.exposures)] += state.exposures
    return Newcomers(sums, exposures, state.maps), len(accepted.users.unique())


def known_rows(public: SASRec) -> Float[Tensor, "n d"]:
    """The rows that the base block taught."""
    return public.items.detach().cpu()[public.has_row.cpu()]


def mean_of(public: SASRec) -> Float[Tensor, " d"]:
    """The mean of the rows that the base block taught."""
    return known_rows(public).mean(0)


def with_predicted_rows(
    public: SASRec, state: Newcomers, wanted: Bool[Tensor, " I"], mean: Float[Tensor, " d"]
) -> SASRec:
    """A copy of the base backbone with the newcomers' rows; items that are not in the catalogue yet keep its mean."""
    return with_rows(public, wanted, predict_rows(state.sums[wanted], state.exposures[wanted], state.maps, mean))


def with_rows(public: SASRec, wanted: Bool[Tensor, " I"], rows: Float[Tensor, "n d"]) -> SASRec:
    """A copy of the base backbone with these rows for the wanted items."""
    model, device = grown(public, len(wanted)), public.items.device
    with torch.no_grad():
        model.items[wanted.to(device)] = rows.to(device)
    model.has_row |= wanted.to(device)
    model.mean_row = public.mean_row.clone()
    return at_rest(model)
