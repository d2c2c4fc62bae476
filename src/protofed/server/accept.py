"""What a server takes of what arrives: checked, clipped once more, counted once. From here on nobody has a name."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from protofed.client.introductions import Introductions, ItemUpload, clip_introductions
from protofed.client.upload import Upload
from protofed.privacy.upload import (
    FIELD_BITS,
    NOTHING,
    PointUploads,
    RoundRule,
    decode_points,
    local_reach,
    local_sums,
)


@dataclass(frozen=True, slots=True)
class Accepted:
    """The uploads of a round as the server works with them; their order tells nothing."""

    n: int
    points: Float[Tensor, "n P d_z"]  # none where devices send all rows
    block: Int[Tensor, " n"]
    total: Float[Tensor, "K row"] | Int[Tensor, "K row"] | None = None  # of all rows; the only thing that is seen
    refused: Mapping[str, int] = field(default_factory=dict)  # how many uploads, by reason


def accept(uploads: Iterable[Upload], rule: RoundRule, *, round_: int, version: int) -> Accepted:
    """The uploads of this round that can be used, and why others cannot; a bad one never stops the round."""
    refused: Counter[str] = Counter()
    seen = torch.zeros(0, dtype=torch.int64)
    kept: list[tuple[Tensor, Tensor, Tensor]] = []
    total: Tensor | None = None
    for upload in uploads:
        reason = fault(upload, rule, round_, version)
        if reason:
            refused[reason] += max(len(upload), 1)
            continue
        tokens = upload.tokens.cpu()
        fresh = first_copies(tokens, seen)
        refused["sent twice"] += int((~fresh).sum())
        seen = torch.cat([seen, tokens[fresh]])
        at = fresh.to(upload.codes.device).nonzero()[:, 0]
        codes, block = upload.codes[at], upload.block[at]
        if rule.form in ("noised rows", "integers"):
            total = _add_rows(total, codes, rule)
        else:
            kept.append((tokens[fresh].to(block.device), block, _points(codes, rule)))
    points, block = _by_token(kept, rule)
    return Accepted(len(seen), points, block, total, {why: n for why, n in refused.items() if n})


def fault(upload: Upload, rule: RoundRule, round_: int, version: int) -> str | None:
    """Why an upload cannot be used; None where it can."""
    if upload.round_ != round_:
        return f"of a round that {'is over' if upload.round_ < round_ else 'has not begun'}"
    if upload.version != version:
        return "made for other prototypes"
    wide = rule.form in ("noised rows", "integers")
    k, width = rule.upload.n_prototypes, rule.upload.width
    shape = (len(upload), *((k, width + 1) if wide else (rule.points, width)))
    kind = torch.int64 if rule.form == "integers" else torch.int8
    if upload.codes.dtype != kind or tuple(upload.codes.shape) != shape:
        return f"codes are not {kind} of shape {'x'.join(map(str, shape[1:]))}"
    if any(column.dtype != torch.int64 or column.shape != shape[:1] for column in (upload.tokens, upload.block)):
        return "tokens and index are not whole numbers, one of each for a device"
    if bool(((upload.block < NOTHING) | (upload.block >= k)).any()):
        return f"an index outside 0..{k - 1}"
    return None


def accept_items(
    uploads: Iterable[ItemUpload], *, slice_index: int, n_items: int, width: int, radius: float = 1.0
) -> tuple[Introductions, Mapping[str, int]]:
    """What devices said of new items, clipped once more, and why some was refused; whose it is, nobody can tell."""
    refused: Counter[str] = Counter()
    seen, n = torch.zeros(0, dtype=torch.int64), 0
    nothing = torch.zeros(0, dtype=torch.int64)
    kept = [(nothing, nothing, torch.zeros(0, width))]
    for upload in uploads:
        reason = item_fault(upload, slice_index, n_items, width)
        if reason:
            refused[reason] += max(len(upload), 1)
            continue
        fresh = first_copies(upload.tokens, seen)
        refused["sent twice"] += int((~fresh).sum())
        seen = torch.cat([seen, upload.tokens[fresh]])
        whose = torch.repeat_interleave(torch.arange(len(upload)), upload.counts)
        finite = upload.values.isfinite().all(1)
        heard = fresh & torch.ones_like(fresh).index_fill(0, whose[~finite], False)
        refused["numbers that are not finite"] += int((fresh & ~heard).sum())
        places, among = n + heard.cumsum(0) - 1, heard[whose]
        kept.append((places[whose][among], upload.items[among], upload.values[among]))
        n += int(heard.sum())
    whose, items, values = (torch.cat(column) for column in zip(*kept, strict=True))
    length = torch.zeros(n, dtype=torch.float64).index_add(0, whose, values.double().square().sum(-1)).sqrt()
    clipped = torch.where((length > radius)[whose][:, None], clip_introductions(whose, values, radius), values)
    return Introductions(whose, items, clipped), {why: count for why, count in refused.items() if count}


def item_fault(upload: ItemUpload, slice_index: int, n_items: int, width: int) -> str | None:
    """Why an upload of new items cannot be used; None where it can."""
    if upload.slice_index != slice_index:
        return f"of a slice that {'is over' if upload.slice_index < slice_index else 'has not begun'}"
    numbers = (upload.tokens, upload.counts, upload.items)
    if any(column.dtype != torch.int64 or column.dim() != 1 for column in numbers) or len(upload.counts) != len(upload):
        return "tokens, counts and items are not whole numbers, a token and a count for each device"
    impossible = (upload.counts < 0) | (upload.counts > len(upload.items))  # their sum might wrap around
    if bool(impossible.any()) or int(upload.counts.sum()) != len(upload.items):
        return "counts that do not add up to the items"
    if upload.values.dtype != torch.float32 or tuple(upload.values.shape) != (len(upload.items), width):
        return f"values are not {width} numbers of 32 bits for each item"
    if bool(((upload.items < 0) | (upload.items >= n_items)).any()):
        return f"an item outside 0..{n_items - 1}"
    whose = torch.repeat_interleave(torch.arange(len(upload)), upload.counts)
    pairs = whose * n_items + upload.items
    if len(pairs.unique()) < len(pairs):  # many short values would add up to a long one
        return "an item named twice by a device"
    return None


def first_copies(tokens: Int[Tensor, " U"], seen: Int[Tensor, " S"]) -> Bool[Tensor, " U"]:
    """Which uploads arrive for the first time."""
    order = tokens.argsort(stable=True)
    ordered = tokens[order]
    again = torch.zeros_like(ordered, dtype=torch.bool)
    again[1:] = ordered[1:] == ordered[:-1]
    repeated = torch.empty_like(again).index_put((order,), again)
    return ~repeated & ~torch.isin(tokens, seen)


def _points(codes: Tensor, rule: RoundRule) -> Float[Tensor, "U P d_z"]:
    """Embeddings from their codes, clipped once more: where the device's noise is in them, to what that may need."""
    upload = rule.upload
    noised = rule.form == "noised points"
    reach = local_reach(upload, upload.noise_std(rule.noise_multiplier, "local") * rule.points**0.5) if noised else None
    index = torch.zeros_like(codes[:, 0, 0], dtype=torch.int64)
    parts = [decode_points(PointUploads(codes[:, p], index), upload, reach)[0] for p in range(rule.points)]
    return torch.stack(parts, dim=1)


def _add_rows(total: Tensor | None, codes: Tensor, rule: RoundRule) -> Tensor:
    """The total with some devices' rows added: noised numbers, or integers modulo 2^32."""
    if rule.form == "integers":
        more = codes.sum(0) if total is None else total + codes.sum(0)
        return more.bitwise_and(2**FIELD_BITS - 1)
    more = local_sums(codes, rule.upload, rule.upload.noise_std(rule.noise_multiplier, "local"))
    return more if total is None else total + more


def _by_token(kept: list[tuple[Tensor, Tensor, Tensor]], rule: RoundRule) -> tuple[Tensor, Tensor]:
    """All points and indices in the order of their tokens, which is that of no arrival and no user."""
    if not kept:
        return torch.zeros(0, rule.points, rule.upload.width), torch.zeros(0, dtype=torch.int64)
    tokens, block, points = (torch.cat(column) for column in zip(*kept, strict=True))
    order = tokens.argsort()
    return points[order], block[order]
