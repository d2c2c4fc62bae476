"""RecICL: a model that is taught once to read demonstrations, and afterwards only shown newer ones.

Bao et al., Customizing in-context learning for dynamic interest adaption in LLM-based recommendation, Findings of ACL
2025.
What we implement (RecICL-Seq): the backbone reads [demonstrations ; history]. The demonstrations are the user's m = 4
newest events, the newest last, and for each one item that was not met. Each is three tokens: the mean of the 10 items
before the event, the item, a label (met or not). Items and blocks start from the warmed-up backbone and train on the
base block in this format, early stopping on its validation part; then they are frozen. Later slices bring newer
demonstrations, out of the query's own history, and rows for new items by the shared rule, untrained.
How it differs: no language model (`recicl_llm` is that form). A candidate is not a token that attends to the
demonstrations: scores are inner products of the last history token's state with item rows, because a token per item and
query, some 80 ms for 7,000 items on a busy core, would add up to hours over a run. At most 10,000 targets of the base
block are learned, each in a window of its own. A summary takes earlier events in the log's order: on
day-resolution logs it may hold one of its own event's day; all are strictly older than the query. Negatives are drawn
blind to the answer.
Nothing is learned after the base block: AF = BWT = 0 by construction wherever the items in question have rows, and
Steps-to-95 % is 0. An item that gets its row later is scored differently from then on, which shows as a positive BWT.
Privacy: inference only; demonstrations stay on the device. New rows are the one release after the base block.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from protofed.backbone.injection import visible
from protofed.backbone.sasrec import ROW_SCALE, Embed, SASRec
from protofed.backbone.training import Descend, PlainDescent, Task, train
from protofed.methods.baselines.demonstrations import Demonstrations, Format, demonstrations
from protofed.methods.baselines.extended import Extended, plain
from protofed.methods.frozen import BackboneState, backbone_evidence, readable, rows_for
from protofed.methods.protocol import Diagnostics, World
from protofed.privacy.draws import MASK
from protofed.seeds import numpy_stream, seed_of, stream
from protofed.slices.histories import PAD, Queries
from protofed.slices.leaks import Evidence
from protofed.slices.stream import TimeSlice

PLACES = 6  # summary, item, "met"; summary, item, "not met"
PROBES = 256  # validation queries on which the demonstrations' effect is measured


class InContext(Extended):
    """A backbone that reads the demonstrations of a history in front of it."""

    def __init__(self, backbone: SASRec, form: Format, kinds: Float[Tensor, "6 d"], ages: Float[Tensor, "m d"]) -> None:
        super().__init__(backbone)
        self.form = form
        self.kinds = nn.Parameter(kinds.clone(), requires_grad=False)
        self.ages = nn.Parameter(ages.clone(), requires_grad=False)

    def demonstration_inputs(self, shown: Demonstrations, embed: Embed) -> Float[Tensor, "B n d"]:
        """Input vectors of the demonstrations; kind and age stand where a history token has its position."""
        real = (shown.before >= 0)[..., None]
        mean = (embed(shown.before) * real).sum(2) / real.sum(2).clamp(min=1)
        summary = torch.where(real.any(2), mean, self.bos)  # (B, m, d)
        label = torch.zeros_like(summary)
        rows = [summary, embed(shown.items), label, summary, embed(shown.negatives), label]
        x = torch.stack(rows, dim=2) * math.sqrt(self.config.width) + self.kinds + self.ages[:, None]
        return x.flatten(1, 2)

    def _start(self, tokens: Tensor, prompt: Tensor | None, embed: Embed | None) -> tuple[Tensor, Tensor]:
        assert prompt is None, "the demonstrations are the prompt"
        shown = demonstrations(tokens, self.form)
        there = torch.stack([shown.shown] * 3 + [shown.negative_shown] * 3, dim=2).flatten(1)  # (B, 6 m)
        x = torch.cat([self.demonstration_inputs(shown, embed or self.embed), self.token_inputs(tokens, embed)], dim=1)
        return self.dropout(x), visible(torch.cat([torch.where(there, 0, PAD), tokens], dim=1), 0)


@dataclass(frozen=True, slots=True)
class RecICLState(BackboneState):
    """The backbone as the base block taught it, the tokens of the format, and how that training went."""

    kinds: Float[Tensor, "6 d"]
    ages: Float[Tensor, "m d"]
    trace: Float[Tensor, " epochs"]  # validation NDCG@10 in the base block


@dataclass(frozen=True, slots=True)
class RecICL:
    count: int = 4  # m: demonstrations
    span: int = 10  # items a demonstration sums up
    epochs: int = 5  # cap, in the base block
    targets: int = 10_000  # at most so many targets of the base block, drawn once
    batch: int = 256  # targets per step

    def start(self, world: World) -> RecICLState:
        config = world.config
        training = replace(config.training, stride=1, batch_size=self.batch)  # demonstrations belong to one target
        task = Task(world.base, self._positions(world), self.epochs, training.slice_learning_rate)
        first = InContext(world.backbone, self._form(world), *self._drawn(world))
        descend = PlainDescent(training.max_grad_norm)
        model, fit = train(first, task, training, seed=config.seed, descend=descend, progress=world.progress)
        assert isinstance(model, InContext)
        kinds, ages, trace = model.kinds.detach(), model.ages.detach(), torch.tensor(fit.trace)
        newest = int(world.base.train_positions[-1])  # the warm-up's
        return RecICLState(plain(model), world.base.index, newest, kinds, ages, trace)

    def learn(
        self, world: World, state: RecICLState, slice_: TimeSlice, descend: Descend
    ) -> tuple[RecICLState, Diagnostics]:
        backbone, new = rows_for(world, state.backbone, slice_)
        learned = replace(state, backbone=backbone.eval(), slice_index=slice_.index)
        said: Diagnostics = {
            "new_rows": int(new.sum()),
            "steps": 0,
            "demonstration_effect": self._effect(world, learned, readable(world, slice_)),
            "base_validation_ndcg10": tuple(state.trace.tolist()),
        }
        return learned, said

    def score(self, world: World, state: RecICLState, queries: Queries) -> Float[Tensor, "B I"]:
        model = self._model(world, state)
        return model.scores(model.last_hidden(queries.tokens), queries.n_items)

    def evidence(self, state: RecICLState) -> Evidence:
        return backbone_evidence(state)

    def _model(self, world: World, state: RecICLState) -> InContext:
        return InContext(state.backbone, self._form(world), state.kinds, state.ages)

    def _form(self, world: World) -> Format:
        """Negatives come from the base block's items: these have rows at every time, so no later slice moves them."""
        key = seed_of(world.config.seed, "demonstrations")
        return Format(self.count, self.span, world.base.n_train_items, (key & MASK, key >> 32))

    def _positions(self, world: World) -> np.ndarray:
        every = world.base.train_positions
        if len(every) <= self.targets:
            return every
        rng = numpy_stream(world.config.seed, "recicl", "targets")
        return np.sort(rng.choice(every, self.targets, replace=False))

    def _drawn(self, world: World) -> tuple[Tensor, Tensor]:
        d, rng = world.config.backbone.width, stream(world.config.seed, "recicl")
        drawn = ROW_SCALE / math.sqrt(d) * torch.randn(PLACES + self.count, d, generator=rng)
        kinds, ages = drawn.to(world.backbone.items.device).split([PLACES, self.count])
        return kinds, ages

    @torch.no_grad()
    def _effect(self, world: World, state: RecICLState, slice_: TimeSlice) -> float:
        """How far demonstrations move the state of a validation query, in units of that state's length."""
        chunk = np.arange(min(PROBES, len(slice_.validation)))
        if not len(chunk):
            return 0.0
        tokens = slice_.queries(chunk, world.config.backbone.history_length).tokens.to(state.backbone.items.device)
        without, with_ = state.backbone.last_hidden(tokens), self._model(world, state).last_hidden(tokens)
        return float(((with_ - without).norm(dim=-1) / without.norm(dim=-1)).mean())
