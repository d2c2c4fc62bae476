"""Any method under a head: its scores, and what the user's own past adds to them on the device.

The head is fitted once, on the later half of the base block's validation part, which has stopped no training (see
`backbone.pretrain.warm_up`); from then on it stays as it is. It reads the query's own history and nothing of anybody
else, so it costs no ε. Where it does not rank the answers of users kept aside better, it is not worn.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from protofed.backbone.training import Descend
from protofed.config import RunConfig
from protofed.inference.head import Head, examples_of, fit_head, join, slim, with_head
from protofed.methods.protocol import Diagnostics, Method, World
from protofed.slices.histories import Queries, moved, trimmed
from protofed.slices.leaks import Evidence
from protofed.slices.stream import TimeSlice, halves

AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class HeadedState:
    """The inner method's state, the head, and the newest event it was fitted on."""

    inner: Any
    head: Head
    worn: bool
    newest_answer: int


@dataclass(frozen=True, slots=True)
class Headed:
    """A method with a head on top."""

    inner: Method[Any]

    def start(self, world: World) -> HeadedState:
        inner = self.inner.start(world)
        head, worn, newest = self.fit(world, inner)
        return HeadedState(inner, head, worn, newest)

    def learn(
        self, world: World, state: HeadedState, slice_: TimeSlice, descend: Descend
    ) -> tuple[HeadedState, Diagnostics]:
        inner, told = self.inner.learn(world, state.inner, slice_, descend)
        about = {"head_worn": int(state.worn), "head_beta": float(state.head.log_beta.exp())}
        return replace(state, inner=inner), {**told, **about}

    def score(self, world: World, state: HeadedState, queries: Queries) -> Float[Tensor, "B I"]:
        scores = self.inner.score(world, state.inner, queries)
        return with_head(state.head.to(scores.device), scores, queries) if state.worn else scores

    def evidence(self, state: HeadedState) -> Evidence:
        return replace(self.inner.evidence(state.inner), head_target=state.newest_answer)

    @torch.no_grad()
    def fit(self, world: World, inner: Any) -> tuple[Head, bool, int]:
        """The head for this state of the method, whether it is worn, and the newest event it has seen."""
        base, length = world.base, world.config.backbone.history_length
        asked = halves(base.validation)[1]
        first = len(base.validation) - slim(len(asked), asked.n_items)
        at, parts = world.backbone.items.device, []
        for start in range(first, len(base.validation), AT_ONCE):
            chunk = np.arange(start, min(start + AT_ONCE, len(base.validation)))
            queries = base.queries(chunk, length)
            scores = self.inner.score(world, inner, moved(trimmed(queries), at)).cpu()
            parts.append(examples_of(scores, base.validation.positives[chunk], queries))
        newest = int(base.validation.positions[-1]) if parts else -1
        if not parts:
            return Head().requires_grad_(False).eval(), False, newest
        with torch.enable_grad():
            head, worn = fit_head(join(parts), world.config.seed)
        return head, worn, newest


def under_head(method: Method[Any], config: RunConfig) -> Method[Any]:
    """The method, with a head where the config asks for one."""
    return Headed(method) if config.scoring.head else method


def without_head(method: Method[Any], state: Any) -> tuple[Method[Any], Any]:
    """The method and the state under a head; both as they are where there is none."""
    return (method.inner, state.inner) if isinstance(method, Headed) else (method, state)
