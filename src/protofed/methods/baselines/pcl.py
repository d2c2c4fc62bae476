"""PCL: a frozen recommender, and for each slice a small prompt on the newest tokens of a history.

Yang et al., PCL: Prompt-based continual learning for user modeling in recommender systems, WWW 2025.
What we implement: slice t adds p_t, one vector for each of the last tau = 8 items of a history, to their input vectors.
A contextual prompt is added to all of them: attention of the history (mean of those items' inputs) over the mean-pooled
prompts of all slices so far. p_t, the three attention matrices, the output LayerNorm and the slice's new item rows
train; earlier prompts and the rest of the backbone never do. Prompts start at zero, which changes no score, and are
aligned at the right end: a history of 3 items meets the last 3 vectors, BOS and padding none.
How it differs: the original's tasks are kinds of user modelling, ours are slices; that prompts are *added* is our
reading. At test the slice is unknown, so the newest prompt and attention over all answer every query: with the true
slice's prompt, forgetting would be near zero by construction. Which items are the last tau depends on the query, so a
training window holds one target and ends right before it; the loop for all targets at once would train prompts on
tokens they never meet when serving. It costs one forward pass per target.
Privacy: p_t, the matrices, the LayerNorm and new rows are fed by gradients, and would be released through DP-SGD; they
are small. The stored prompts are earlier releases.
"""

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from protofed.backbone.new_items import only_rows
from protofed.backbone.sasrec import Embed, SASRec
from protofed.backbone.training import Descend, ParameterGroups, Task, Trainable, train
from protofed.methods.baselines.extended import Extended, plain
from protofed.methods.frozen import BackboneState, backbone_evidence, backbone_scores, rows_for, start_from_backbone
from protofed.methods.protocol import Diagnostics, World
from protofed.seeds import stream
from protofed.slices.histories import Queries
from protofed.slices.leaks import Evidence
from protofed.slices.stream import TimeSlice


def contextual_prompt(
    asking: Float[Tensor, "B d"], prompts: Float[Tensor, "t tau d"], attention: Float[Tensor, "3 d d"]
) -> Float[Tensor, "B d"]:
    """Sum over slices j of softmax_j(<W_q q, W_k m_j> / sqrt(d)) W_v m_j; m_j is the mean of prompt j's vectors."""
    query, key, value = attention
    memory = prompts.mean(1)  # (t, d)
    fit = (asking @ query.T) @ (memory @ key.T).T / math.sqrt(asking.shape[-1])  # (B, t)
    mixed: Tensor = fit.softmax(-1) @ (memory @ value.T)
    return mixed


class Prompted(Extended):
    """A backbone whose newest input tokens carry the newest prompt and the contextual one."""

    earlier: Tensor

    def __init__(self, backbone: SASRec, prompts: Float[Tensor, "t tau d"], attention: Float[Tensor, "3 d d"]) -> None:
        super().__init__(backbone)
        self.register_buffer("earlier", prompts[:-1].clone())
        self.newest = nn.Parameter(prompts[-1].clone(), requires_grad=False)
        self.attention = nn.Parameter(attention.clone(), requires_grad=False)

    def prompts(self) -> Float[Tensor, "t tau d"]:
        return torch.cat([self.earlier, self.newest[None]])

    def token_inputs(self, tokens: Int[Tensor, "B L"], embed: Embed | None = None) -> Float[Tensor, "B L d"]:
        x = super().token_inputs(tokens, embed)
        n = min(len(self.newest), tokens.shape[1])
        places = tokens[:, -n:]
        real = (places >= 0)[..., None]  # items: neither BOS nor padding
        rows = (embed or self.embed)(places) * math.sqrt(self.config.width) * real
        asking = rows.sum(1) / real.sum(1).clamp(min=1)
        added = self.newest[-n:] + contextual_prompt(asking, self.prompts(), self.attention)[:, None]  # (B, n, d)
        return torch.cat([x[:, :-n], x[:, -n:] + added * real], dim=1)


def prompts_and_rows(new: Tensor, *, head: bool) -> Trainable:
    """Trains the newest prompt, the attention, the output LayerNorm if `head`, and these item rows."""

    def trainable(model: SASRec) -> ParameterGroups:
        assert isinstance(model, Prompted)
        chosen = [model.newest, model.attention, *(model.norm.parameters() if head else ())]
        return [{"params": chosen}, *(only_rows(new)(model) if new.any() else ())]

    return trainable


@dataclass(frozen=True, slots=True)
class PCLState(BackboneState):
    """The backbone, the prompts of the slices learned so far and the attention over them."""

    prompts: Float[Tensor, "t tau d"]
    attention: Float[Tensor, "3 d d"]


def prompted_model(state: PCLState) -> Prompted:
    return Prompted(state.backbone, state.prompts, state.attention)


@dataclass(frozen=True, slots=True)
class PCL:
    length: int = 8  # tau
    head: bool = True  # train the output LayerNorm
    batch: int = 256  # targets per step

    def start(self, world: World) -> PCLState:
        begun, d, device = start_from_backbone(world), world.config.backbone.width, world.backbone.items.device
        attention, rng = torch.empty(3, d, d), stream(world.config.seed, "pcl")
        for matrix in attention:
            nn.init.xavier_uniform_(matrix, generator=rng)
        none = torch.zeros(0, self.length, d, device=device)
        return PCLState(world.backbone, begun.slice_index, begun.newest_target, none, attention.to(device))

    def learn(self, world: World, state: PCLState, slice_: TimeSlice, descend: Descend) -> tuple[PCLState, Diagnostics]:
        backbone, new = rows_for(world, state.backbone, slice_)
        prompts = torch.cat([state.prompts, state.prompts.new_zeros(1, *state.prompts.shape[1:])])
        training = replace(world.config.training, stride=1, batch_size=self.batch)
        task = Task(slice_, slice_.train_positions, training.slice_epochs, training.slice_learning_rate)
        model, fit = train(
            Prompted(backbone, prompts, state.attention),
            task,
            training,
            seed=world.config.seed,
            descend=descend,
            trainable=prompts_and_rows(new, head=self.head),
            progress=world.progress,
        )
        assert isinstance(model, Prompted)
        newest = max(state.newest_target, fit.newest_target)
        learned = PCLState(plain(model), slice_.index, newest, model.prompts().detach(), model.attention.detach())
        length = float(model.newest.detach().norm(dim=-1).mean())
        return learned, {"prompt_length": length, "new_rows": int(new.sum()), **fit.diagnostics()}

    def score(self, world: World, state: PCLState, queries: Queries) -> Float[Tensor, "B I"]:
        if not len(state.prompts):
            return backbone_scores(state, queries)
        model = prompted_model(state)
        return model.scores(model.last_hidden(queries.tokens), queries.n_items)

    def evidence(self, state: PCLState) -> Evidence:
        return backbone_evidence(state)
