"""SAIL-PIW: imitate yesterday's model, but let each user decide how closely.

Wang et al., Structure aware incremental learning with personalized imitation weights for recommender systems, AAAI
2023.
What we implement: a user's interests are the softmax, over 10 item clusters, of the last hidden state against each
transformed cluster centre. The squared change of these interests since the teacher goes through a small network to one
positive weight; weights are scaled to mean 1 over the batch's returning users, and users without events before the
slice weigh 0. The mean loss gains strength * weight * LwF's divergence, and the clusters' own loss (deep embedded
clustering: Student-t kernel, one degree of freedom, item rows held fixed). Centres are drawn anew from the item rows at
each slice; transforms and network are carried on. All of it trains together (`weights="joint"`), as in the original;
`weights="fixed"` leaves the network as it was drawn.
How it differs: the original distils graph neighbourhoods; here the divergence is LwF's, with LwF's strength and
temperature. Transforms start at the identity: near zero, everybody's interests would be uniform and nobody would ever
change. Learning the weights on the validation part is left out: it may only select. The network stays at its last epoch
where the backbone goes back to its best. Nothing makes a user who changed weigh less: minimising weight * divergence
with the mean held at 1 favours users whose divergence is small anyway, so the log keeps how even the weights are.
Privacy: transforms and network are shared weights learned from users, inside the same private step as the backbone, but
the mean over the batch ties users together and would have to become a constant there. The teacher is released anyway.
"""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Generator, Tensor, nn

from protofed.backbone.extras import Extra, Lots, Notes
from protofed.backbone.losses import last_states
from protofed.backbone.sasrec import SASRec
from protofed.backbone.training import Descend, ParameterGroups
from protofed.methods.baselines.finetune_last import fine_tuned
from protofed.methods.baselines.importance import on
from protofed.methods.baselines.lwf import Lists, divergence, grade_lists, known_items, logits_of
from protofed.methods.frozen import BackboneState, backbone_evidence, backbone_scores, rows_for, start_from_backbone
from protofed.methods.protocol import Diagnostics, World
from protofed.methods.variants import parts_to_train
from protofed.seeds import seeded, stream
from protofed.slices.histories import Queries
from protofed.slices.leaks import Evidence
from protofed.slices.stream import TimeSlice
from protofed.slices.windows import Windows, real_targets

NOTED = ("divergence", "weight_evenness", "weight_spread")


@dataclass(frozen=True, slots=True)
class PersonalState(BackboneState):
    """A backbone, and what turns a change of interests into a weight."""

    weighting: dict[str, Tensor]


class Weighting(nn.Module):
    """Cluster centres, their transforms, and the network from changed interests to a weight."""

    def __init__(self, n_clusters: int, width: int, rng: Generator) -> None:
        super().__init__()
        noise = 0.01 * torch.randn(n_clusters, width, width, generator=rng)
        self.centres = nn.Parameter(torch.zeros(n_clusters, width))
        self.transforms = nn.Parameter(torch.eye(width) + noise)
        self.widen, self.narrow = nn.Linear(n_clusters, width), nn.Linear(width, 1)

    def interests(self, hidden: Float[Tensor, "W d"]) -> Float[Tensor, "W c"]:
        """How much of each user's interest lies in each cluster."""
        turned = torch.einsum("cd,cde->ce", self.centres, self.transforms)
        return (hidden @ turned.T).softmax(-1)

    def forward(self, old: Float[Tensor, "W d"], new: Float[Tensor, "W d"]) -> Float[Tensor, " W"]:
        """A positive weight for each user, before scaling."""
        change = (self.interests(old) - self.interests(new)) ** 2
        return F.softplus(self.narrow(F.relu(self.widen(change))))[:, 0]


def scale_to_mean_one(weights: Float[Tensor, " W"], counts: Bool[Tensor, " W"]) -> Float[Tensor, " W"]:
    """Weights of mean 1 over those that count; 0 for the others."""
    weights = weights * counts
    return weights * counts.sum() / weights.sum().clamp(min=1e-9)


def clustering_loss(rows: Float[Tensor, "n d"], centres: Float[Tensor, "c d"]) -> Float[Tensor, ""]:
    """KL(p || q) per item: q the Student-t assignment to centres, p the same sharpened and evened out."""
    squares = (rows**2).sum(1)[:, None] + (centres**2).sum(1) - 2 * rows @ centres.T  # (n, c); of distances
    near = 1 / (1 + squares.clamp(min=0))
    q = near / near.sum(1, keepdim=True)
    sharp = (q**2 / q.sum(0)).detach()
    p = sharp / sharp.sum(1, keepdim=True)
    apart: Tensor = (p * (p.log() - q.log())).sum(1)
    return apart.mean()


def evenness(weights: Float[Tensor, " W"], counts: Bool[Tensor, " W"]) -> Float[Tensor, ""]:
    """Entropy of the shares of those that count as a part of the highest possible: 1 where all are equal."""
    shares = weights * counts / (weights * counts).sum().clamp(min=1e-9)
    entropy: Tensor = torch.special.entr(shares).sum()
    return entropy / counts.sum().clamp(min=2).log()


def returning_users(slice_: TimeSlice) -> Bool[Tensor, " u"]:
    """Who has an event before this slice."""
    met = np.zeros(slice_.past.n_users, dtype=bool)
    met[slice_.past.users[: slice_.bounds[-1].start]] = True
    return torch.from_numpy(met)


def note(
    notes: Notes, apart: Float[Tensor, " W"], weights: Float[Tensor, " W"], here: Bool[Tensor, " W"], old: Tensor
) -> None:
    """How far apart the users who are `here` are, and how the weights of the `old` ones among them spread around 1."""
    notes.add("divergence", (apart * here).sum(), here.sum())
    notes.add("weight_evenness", evenness(weights, old))
    notes.add("weight_spread", (((weights - 1) ** 2 * old).sum() / old.sum().clamp(min=1)).sqrt())


@dataclass(frozen=True, slots=True)
class SailPIW:
    strength: float = 1.0  # lambda
    temperature: float = 2.0
    clusters: int = 10  # K_c
    weights: Literal["joint", "fixed"] = "joint"
    lists: Lists = field(default_factory=Lists)

    def start(self, world: World) -> PersonalState:
        begun = start_from_backbone(world)
        weighting = self._drawn(world).state_dict()
        return PersonalState(begun.backbone, begun.slice_index, begun.newest_target, dict(weighting))

    def learn(
        self, world: World, state: PersonalState, slice_: TimeSlice, descend: Descend
    ) -> tuple[PersonalState, Diagnostics]:
        notes, weighting = Notes(), self._seeded(world, state, slice_)
        first, new = rows_for(world, state.backbone, slice_)
        models = (state.backbone, first)
        extra = self._imitating(world, models, slice_, weighting, notes) if self.strength else None

        def trainable(model: SASRec) -> ParameterGroups:
            added = [{"params": list(weighting.parameters())}] if self.strength else []
            return parts_to_train(world, new)(model) + added

        model, fit = fine_tuned(world, (first, new), slice_, descend, extra=extra, trainable=trainable)
        newest = max(state.newest_target, fit.newest_target)
        kept = {name: tensor.detach().clone() for name, tensor in weighting.state_dict().items()}
        return PersonalState(model, slice_.index, newest, kept), {
            **dict.fromkeys(NOTED, 0.0),
            **notes.means(),
            **fit.diagnostics(),
        }

    def _drawn(self, world: World) -> Weighting:
        """Transforms and network as they start."""
        seed, width = world.config.seed, world.config.backbone.width
        with seeded(seed, "sail-piw", "network"):  # PyTorch's layers draw from the global generator
            weighting = Weighting(self.clusters, width, stream(seed, "sail-piw", "transforms"))
        return weighting.requires_grad_(False).to(world.backbone.items.device)

    def _seeded(self, world: World, state: PersonalState, slice_: TimeSlice) -> Weighting:
        """Transforms and network as they were left, centres at random item rows."""
        weighting, rows = self._drawn(world), state.backbone.items[state.backbone.has_row]
        weighting.load_state_dict(on(state.weighting, rows.device))
        chosen = torch.randperm(len(rows), generator=stream(world.config.seed, "sail-piw", "centres", slice_.index))
        chosen = chosen[torch.arange(self.clusters) % len(rows)]
        weighting.centres.copy_(rows[chosen.to(rows.device)])
        return weighting

    def _imitating(
        self, world: World, models: tuple[SASRec, SASRec], slice_: TimeSlice, weighting: Weighting, notes: Notes
    ) -> Extra:
        """The weighted divergence and the clusters' loss as an addition to each window's summed loss.

        `models` are the teacher and what the slice trains from.
        """
        teacher, rows = models[0], known_items(models[1])
        device, known = teacher.items.device, known_items(teacher)
        rng = stream(world.config.seed, "sail-piw", "lists", slice_.index, device=device)
        returning = returning_users(slice_).to(device)

        def losses(model: SASRec, batch: Windows, lots: Lots, notes: Notes) -> Float[Tensor, " W"]:
            asked, hidden = grade_lists(teacher, known, batch, self.lists, lots), last_states(model, batch)
            apart = divergence(asked.logits, logits_of(model, hidden, asked.items), asked.real, self.temperature)
            n = real_targets(batch)
            counts = returning[batch.users] & (n > 0)
            weights = scale_to_mean_one(weighting(asked.hidden, hidden), counts)
            note(notes, apart.detach(), weights.detach(), n > 0, counts)
            weights = weights if self.weights == "joint" else weights.detach()
            clustering = clustering_loss(model.items.detach()[rows], weighting.centres)
            return (self.strength * weights * apart + clustering) * n

        return Extra(losses, notes, rng)

    def score(self, world: World, state: PersonalState, queries: Queries) -> Float[Tensor, "B I"]:
        return backbone_scores(state, queries)

    def evidence(self, state: PersonalState) -> Evidence:
        return backbone_evidence(state)
