"""Several short windows on one line of tokens, so that a batch of a sparse log is not mostly padding.

A user of such a log has five to fifteen events where a window has room for fifty. Windows that share a line never see
each other (`Lines.windows` says whose a token is) and every token keeps the place it had, so no loss changes.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from protofed.slices.histories import PAD

NOBODY = -1
WORTH_SHARING = 0.6  # lines pay where windows are filled to less than this; fuller ones fit too rarely side by side


@dataclass(frozen=True, slots=True)
class Lines:
    """The tokens of W windows on R lines as long as a window: a token moves `shift` columns to the right."""

    tokens: Int[Tensor, "R L"]
    windows: Int[Tensor, "R L"]  # whose token it is; NOBODY for padding
    places: Int[Tensor, "R L"]  # its column in its own window, 0 for padding
    line: Int[Tensor, " W"]
    shift: Int[Tensor, " W"]  # never above 0: a window's newest token stands in its last column


def lengths_of(tokens: Int[Tensor, "W L"]) -> Int[Tensor, " W"]:
    """How many tokens each window has; they stand at its right end."""
    return (tokens != PAD).sum(-1)


def worth_sharing(tokens: Int[Tensor, "W L"]) -> bool:
    """Whether windows are so short that several of them fit on a line."""
    return bool(len(tokens)) and float(lengths_of(tokens).double().mean()) <= WORTH_SHARING * tokens.shape[1]


def first_fit(lengths: list[int], room: int) -> tuple[list[int], list[int]]:
    """For each window its line and the first column there: the longest first, each on the first line that has room."""
    line, column, used = [0] * len(lengths), [0] * len(lengths), [0]
    for window in sorted(range(len(lengths)), key=lambda w: -lengths[w]):
        chosen = next((k for k, taken in enumerate(used) if taken + lengths[window] <= room), len(used))
        if chosen == len(used):
            used.append(0)
        line[window], column[window] = chosen, used[chosen]
        used[chosen] += lengths[window]
    return line, column


def sharing_lines(tokens: Int[Tensor, "W L"], multiple: int = 1) -> Lines:
    """The windows' tokens on as few lines as first-fit finds, and empty ones up to a multiple."""
    n, room = tokens.shape
    lengths = lengths_of(tokens)
    line, column = (torch.tensor(found, dtype=torch.int64) for found in first_fit(lengths.tolist(), room))
    shift = column + lengths - room
    n_lines = -(-(int(line.max()) + 1 if n else 1) // multiple) * multiple
    window, place = (tokens != PAD).nonzero(as_tuple=True)
    at = (line[window], place + shift[window])

    def laid(values: Tensor, otherwise: int) -> Tensor:
        return torch.full((n_lines, room), otherwise, dtype=torch.int64).index_put(at, values)

    return Lines(laid(tokens[window, place], PAD), laid(window, NOBODY), laid(place, 0), line, shift)


def columns_of(lines: Lines) -> tuple[Tensor, ...]:
    return lines.tokens, lines.windows, lines.places, lines.line, lines.shift


def moved(lines: Lines, device: torch.device | str) -> Lines:
    """The same lines on another device."""
    return Lines(*(column.to(device, non_blocking=True) for column in columns_of(lines)))


def send_together(parts: list[Lines], device: torch.device) -> list[Lines]:
    """All of them on the device, as views of tensors that were sent at once."""
    by_column = list(zip(*map(columns_of, parts), strict=True))
    sent = [torch.cat(pieces).to(device).split([len(piece) for piece in pieces]) for pieces in by_column]
    return [Lines(*pieces) for pieces in zip(*sent, strict=True)]
