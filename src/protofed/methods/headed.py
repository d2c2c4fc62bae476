"""Any method under a head: its scores, and what the user's own past and everybody's counts add to them on the device.

The head is fitted once, on the later half of the base block's validation part, which has stopped no training (see
`backbone.pretrain.warm_up`); from then on it stays as it is. Which counts it reads is the one thing that touches
anybody else's events: fresh ones where the method shares raw events itself; those of the base block, for which no ε is
spent; or these and noised releases. Where a part does not rank the answers of users kept aside better, it is not worn.

Where devices choose what of theirs they use, the head is the bare backbone's: devices choose under it, each by its own
validation events, and only where base users' prompts pay under it are prompts uploaded.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from protofed.backbone.sasrec import SASRec
from protofed.backbone.training import Descend
from protofed.config import PrivacyConfig, RunConfig, ablations_of
from protofed.federation.plan import Stream, ledger, plan_releases
from protofed.federation.popularity import base_votes, rehearse_popularity, release_popularity
from protofed.inference.fit_head import Examples, examples_of, fit_head, gain_of, join, slim
from protofed.inference.head import FittedHead, Head, with_head
from protofed.inference.item_side import ItemCounts, count_items
from protofed.inference.own_past import NUMBERS, QUERY_TIME
from protofed.methods.catalogue import has_dial, private_by_itself, shares_nothing
from protofed.methods.frozen import Frozen
from protofed.methods.protocol import Choosing, Diagnostics, Method, Releasing, World
from protofed.methods.protofed_rules import without_uploads
from protofed.privacy.draws import SeededDraws
from protofed.privacy.ledger import Ledger
from protofed.privacy.mechanism import seeded_noise
from protofed.seeds import stream
from protofed.slices.histories import Queries, moved, trimmed
from protofed.slices.leaks import Evidence
from protofed.slices.stream import TimeSlice

AT_ONCE = 256
PARTS = 8  # the base block is as long as eight slices
AGES = (0, 2, 4, 6)  # parts: how old the base block's counts are in later slices
SHARE = 0.6  # of ε, for popularity; new items' rows beside it get as much
BARE = Frozen(new_rows=False)  # the backbone as it is
Counts = Literal["fresh", "base", "released"]
Fit = Callable[[float], tuple[Examples, Head]]  # of the bare backbone's head, by the noise of popularity


@dataclass(frozen=True, slots=True)
class HeadedState:
    """The inner method's state; the head with its counts; the newest event it was fitted on, and where counts end."""

    inner: Any
    fitted: FittedHead
    newest_answer: int
    counts_until: int
    noise: float = 0.0  # of each release of popularity; 0: it is not released
    slice_index: int = 0
    uploads_out: bool = False  # base users' prompts did not pay under the head: none is uploaded


@dataclass(frozen=True, slots=True)
class Headed:
    """A method with a head on top, which counts to read, and which parts it may wear."""

    inner: Method[Any]
    counts: Counts = "base"
    own: bool = True
    items: bool = True
    query_time: bool = True
    of_backbone: bool = False  # whether the head is fitted to the bare backbone's answers, and devices choose under it

    @property
    def unread(self) -> tuple[int, ...]:
        """The numbers of the own past that the head leaves out."""
        return () if self.query_time else tuple(NUMBERS.index(name) for name in QUERY_TIME)

    def start(self, world: World) -> HeadedState:
        fit_bare = cache(partial(self.fit, world, BARE, BARE.start(world)))
        popularity = self.plan_popularity(world, fit_bare) if self.counts == "released" and self.items else None
        noise = popularity.noise_multiplier if popularity else 0.0
        inner = self.inner.start(replace(world, beside=(popularity,) if popularity else ()))
        world.progress("head", 0, None)
        counts, uploads_out = counts_at(world, self.counts, 0), False
        if self.of_backbone and isinstance(self.inner, Choosing):
            fitted = FittedHead(fit_bare(noise)[1], counts)
            inner, pay = self.inner.choose_under(replace(world, head=fitted), inner)
            noise = noise if pay else self.noise_without_uploads(world, fit_bare, inner, noise)
            fitted, uploads_out = replace(fitted, head=fit_bare(noise)[1]), not pay
        else:
            fitted = FittedHead(self.fit(world, self.inner, inner, noise)[1], counts)
        asked, until = later_half(world.base), world.base.bounds[-1].train_end
        newest = int(asked[-1]) if len(asked) else -1
        return HeadedState(inner, fitted, newest, until, noise, uploads_out=uploads_out)

    def fit(self, world: World, method: Method[Any], inner: Any, noise: float) -> tuple[Examples, Head]:
        """The questions of the base block as this method answers them, and the head that fits it."""
        ages = (0,) if self.counts == "fresh" else AGES
        examples = examples_at(method, world, inner, ages, noise, self.counts)
        return examples, fit_head(examples, world.config.seed, own=self.own, items=self.items, unread=self.unread)

    def inside(self, world: World, state: HeadedState) -> World:
        """The world as the method inside is to see it: with the head it is under, without uploads that do not pay."""
        config = without_uploads(world.config) if state.uploads_out else world.config
        return replace(world, config=config, head=state.fitted)

    def learn(
        self, world: World, state: HeadedState, slice_: TimeSlice, descend: Descend
    ) -> tuple[HeadedState, Diagnostics]:
        inner, told = self.inner.learn(self.inside(world, state), state.inner, slice_, descend)
        counts, until, heard = state.fitted.counts, state.counts_until, {}
        if self.counts == "fresh":
            start, until = slice_.bounds[-1].part("train")
            counts = count_items(slice_.past, (start, until), until, slice_.n_train_items)
        elif state.noise:
            seed = world.config.seed
            noise = seeded_noise(stream(seed, "popularity noise", slice_.index))
            counts, n = release_popularity(counts, slice_, state.noise, noise, SeededDraws(seed))
            heard = {"popularity_clients": n, "popularity_noise": state.noise}
        fitted = FittedHead(state.fitted.head, counts)
        state = replace(state, inner=inner, fitted=fitted, counts_until=until, slice_index=slice_.index)
        return state, {
            **told,
            **heard,
            **about_head(fitted),
            **({"uploads_out": int(state.uploads_out)} if self.of_backbone else {}),
        }

    def score(self, world: World, state: HeadedState, queries: Queries) -> Float[Tensor, "B I"]:
        scores = self.inner.score(self.inside(world, state), state.inner, queries)
        if not state.fitted.head.worn:
            return scores
        return with_head(state.fitted, scores.cpu(), moved(queries, "cpu")).to(scores.device)

    def evidence(self, state: HeadedState) -> Evidence:
        inner = self.inner.evidence(state.inner)
        return replace(inner, head_target=state.newest_answer, counts_until=state.counts_until)

    def releases(self, world: World, state: HeadedState, slices_ahead: int = 0) -> Ledger:
        """What the method inside releases, and popularity once a slice where that is released."""
        inside = inner_releases(self.inner, self.inside(world, state), state.inner, slices_ahead)
        made = state.slice_index + slices_ahead
        popularity = popularity_stream(world.config.privacy, made, state.noise)
        return (*inside, *(ledger((popularity,)) if state.noise and made else ()))

    def noise_without_uploads(self, world: World, fit_bare: Fit, inner: Any, noise: float) -> float:
        """The noise of popularity where no prompt is uploaded: all that new items leave of the budget is its."""
        if self.counts != "released" or not self.items or not world.config.privacy.target_epsilon:
            return noise
        world = replace(world, config=without_uploads(world.config))
        beside = inner_releases(self.inner, world, inner, world.config.stream.n_slices)
        planned = self.plan_popularity(world, fit_bare, beside)
        return planned.noise_multiplier if planned else 0.0

    def plan_popularity(self, world: World, fit_bare: Fit, beside: Ledger | None = None) -> Stream | None:
        """The stream of popularity with its noise, where a rehearsal on the base block says that it pays.

        With `beside`, which is all else that is released, it may have the rest of the budget.
        """
        config = world.config
        asked = popularity_stream(config.privacy, config.stream.n_slices, config.privacy.newcomer_noise)
        if config.privacy.trust != "central" or "popularity" in ablations_of(config.protofed) or not asked.rounds:
            return None
        asked = asked if beside is None else replace(asked, share=None)
        fixed = tuple(
            Stream(one.stream, one.sampling_rate, one.count, one.noise_multiplier, SHARE) for one in beside or ()
        )
        planned = plan_releases(config.privacy, (asked, *fixed))[0]
        without, released = (fit_bare(noise) for noise in (0.0, planned.noise_multiplier))
        return planned if gain_of(*released, *without, config.seed) else None


def inner_releases(method: Method[Any], world: World, state: Any, slices_ahead: int) -> Ledger:
    """What the method inside has released and, ahead of it, will."""
    return method.releases(world, state, slices_ahead) if isinstance(method, Releasing) else ()


def popularity_stream(privacy: PrivacyConfig, rounds: int, noise: float) -> Stream:
    """So many releases of popularity by everybody; without a budget with twice the noise of the rounds."""
    noise = noise or (0.0 if privacy.target_epsilon else 2 * privacy.noise_multiplier)
    return Stream("popularity", 1.0, rounds, noise, SHARE)


def about_head(fitted: FittedHead) -> dict[str, int | float]:
    """What the run's log keeps of a head."""
    head = fitted.head
    worn = {"head_own_past": int(head.own is not None), "head_items": int(head.items is not None)}
    return {**worn, "head_beta": float(head.log_beta.detach().exp())}


def later_half(base: TimeSlice) -> np.ndarray:
    """The log positions of the questions that heads are fitted on: those that stop no training."""
    n = len(base.validation)
    return base.validation.positions[n - slim(n - n // 2, base.validation.n_items) :]


def counts_at(world: World, counts: Counts, age: int, noise: float = 0.0) -> ItemCounts:
    """What the head reads, as it was so many parts before the base block's end; with noise, and told since then."""
    base = world.base
    if counts == "fresh":
        start, end = base.bounds[-1].part("train")
        return count_items(base.past, (end - (end - start) // PARTS, end), end, base.n_train_items)
    if not noise:
        return base_votes(base, age)
    return rehearse_popularity(base, age, noise, seeded_noise(stream(world.config.seed, "popularity rehearsal", age)))


@torch.no_grad()
def examples_at(
    method: Method[Any], world: World, inner: Any, ages: tuple[int, ...], noise: float, counts: Counts
) -> Examples:
    """The questions a head is fitted on, each asked at one of these ages in turn."""
    base, n, at = world.base, len(world.base.validation), world.backbone.items.device
    places = np.arange(n - len(later_half(base)), n)
    parts = []
    for which, age in enumerate(ages):
        aged = forget_items(inner, base_votes(base, age).known) if age else inner
        told = counts_at(world, counts, age, noise)
        for chunk in chunks(places[which :: len(ages)]):
            queries = base.queries(chunk, world.config.backbone.history_length)
            scores = method.score(world, aged, moved(trimmed(queries), at)).cpu()
            parts.append(examples_of(scores, base.validation.positives[chunk], queries, told))
    return join(parts)


def chunks(places: np.ndarray) -> Iterator[np.ndarray]:
    """Not too many at once; a single empty one where there are none."""
    for start in range(0, max(len(places), 1), AT_ONCE):
        yield places[start : start + AT_ONCE]


def forget_items(state: Any, known: int) -> Any:
    """The state with a backbone that has no trained rows for items from number `known` on; one without it as it is."""
    backbone = getattr(state, "backbone", None)
    if not isinstance(backbone, SASRec):
        return state
    shorter = copy.deepcopy(backbone)
    shorter.has_row[known:] = False
    if shorter.content is not None:
        shorter.content.refresh(shorter.items.detach(), shorter.has_row)
    return replace(state, backbone=shorter)


def under_head(method: Method[Any], config: RunConfig) -> Method[Any]:
    """The method, with a head where the config asks for one."""
    if not config.scoring.head:
        return method
    out = ablations_of(config.protofed)
    own, items, query_time = (name not in out for name in ("own-past", "item-counts", "query-time"))
    return Headed(method, counts_for(config), own, items, query_time, of_backbone=has_dial(config.method))


def counts_for(config: RunConfig) -> Counts:
    """Which counts the head of this run may read: what is shared says it."""
    if private_by_itself(config.method, config.protofed.mode):
        return "released" if config.protofed.mode == "private" else "base"
    return "base" if config.privacy.wrap or shares_nothing(config) else "fresh"


def without_head(method: Method[Any], state: Any) -> tuple[Method[Any], Any]:
    """The method and the state under a head; both as they are where there is none."""
    return (method.inner, state.inner) if isinstance(method, Headed) else (method, state)
