"""How much a client's queries drift, and what follows: the gate of the short prompt, the pull on the long one."""

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DriftState:
    """What a client remembers of its queries: their rolling mean and how far it has moved."""

    mean: Float[Tensor, "U d_z"]  # rolling mean of h; void before the first period
    step: Float[Tensor, "U d_z"]  # its last movement, by coordinate
    total: Float[Tensor, " U"]  # sum of the lengths of all movements
    periods: Int[Tensor, " U"]  # T_u: periods observed; in the simulator a period is a slice

    @property
    def drift(self) -> Float[Tensor, " U"]:
        """Length of the last movement; 0 in the first period."""
        length: Tensor = self.step.norm(dim=-1)
        return length

    @property
    def mean_drift(self) -> Float[Tensor, " U"]:
        """Mean movement per period; 0 before there are two. Eq. (16), eq:adaptive_lambda."""
        return self.total / (self.periods - 1).clamp(min=1)


def no_drift(n: int, d_z: int, *, device: torch.device | None = None) -> DriftState:
    """The state of clients of which nothing was seen."""
    zeros = torch.zeros(n, d_z, device=device)
    return DriftState(zeros, zeros, zeros[:, 0], torch.zeros(n, dtype=torch.long, device=device))


def observe(
    state: DriftState, h: Float[Tensor, "U d_z"], active: Bool[Tensor, " U"] | None = None, *, decay: float = 0.9
) -> DriftState:
    """The state after one more period (session) with query h; inactive clients and those with a non-finite h stay.

    The rolling mean is decay * mean + (1 - decay) * h, and h itself in the first period.
    """
    use = h.isfinite().all(-1) if active is None else active & h.isfinite().all(-1)
    first = (state.periods == 0)[:, None]
    mean = torch.where(first, h, decay * state.mean + (1 - decay) * h)
    step = torch.where(first, torch.zeros_like(h), mean - state.mean)
    seen = use[:, None]
    return DriftState(
        mean=torch.where(seen, mean, state.mean),
        step=torch.where(seen, step, state.step),
        total=torch.where(use, state.total + step.norm(dim=-1), state.total),
        periods=state.periods + use,
    )


@dataclass(frozen=True, slots=True)
class Gate:
    """Centre, spread, slope a and offset b of the drift gate; in the vector form one of each for every coordinate."""

    centre: Float[Tensor, "*d_z"]
    spread: Float[Tensor, "*d_z"]
    slope: Float[Tensor, "*d_z"]
    bias: Float[Tensor, ""]


def literal_gate() -> Gate:
    """sigma(drift) as printed: never below one half, whatever the drift."""
    zero, one = torch.zeros(()), torch.ones(())
    return Gate(zero, one, one, zero)


def fit_gate(drifts: Float[Tensor, "n *d_z"], *, slope: float = 1.0, bias: float = -1.0) -> Gate:
    """The gate centred and scaled by median and MAD of the drifts of base users, coordinate by coordinate.

    The slope is shared out over the coordinates. Where more than half of the drifts are equal the standard deviation
    takes the place of the MAD, and 1 where all are.
    """
    finite = drifts[drifts.flatten(1).isfinite().all(1)] if drifts.dim() > 1 else drifts[drifts.isfinite()]
    if len(finite) == 0:
        return replace(literal_gate(), slope=torch.tensor(slope), bias=torch.tensor(bias))
    centre = _median(finite)
    mad, std = _median((finite - centre).abs()), finite.std(0, correction=0)
    spread = torch.where(mad > 0, mad, torch.where(std > 0, std, torch.ones_like(std)))
    share = slope / max(centre.numel(), 1)
    return Gate(centre, spread, torch.full_like(centre, share), torch.tensor(bias).to(centre))


def _median(x: Float[Tensor, "n *d_z"]) -> Float[Tensor, "*d_z"]:
    """The median along the first dimension, halfway between the middle two where n is even."""
    ordered = x.sort(0).values
    return (ordered[(len(x) - 1) // 2] + ordered[len(x) // 2]) / 2


def drift_gate(drift: Float[Tensor, "U *d_z"], gate: Gate) -> Float[Tensor, " U"]:
    """alpha: how strongly the short prompt counts, near 1 for users who drift more than most, unnumbered after Eq. (3).

    The paper's a^T Delta has a vector a and a scalar Delta, and cannot fall below one half for a > 0; hence centre,
    spread and offset. The vector form takes |step| by coordinate.
    """
    score = gate.slope * (drift - gate.centre) / gate.spread
    return (score.flatten(1).sum(1) if score.dim() > 1 else score).add(gate.bias).sigmoid()


def fit_kappa(mean_drifts: Float[Tensor, " n"]) -> float:
    """The kappa at which a base user at the 90th percentile of drift is pulled a tenth as much as one without drift."""
    finite = mean_drifts[mean_drifts.isfinite()].sort().values
    high = float(finite[min(len(finite) - 1, int(0.9 * len(finite)))]) if len(finite) else 0.0
    return math.log(10) / high if high > 0 else 0.0


def adaptive_stability(
    mean_drift: Float[Tensor, " U"], *, kappa: float, lambda_max: float = 1.0, least: float = 0.1
) -> Float[Tensor, " U"]:
    """lambda_s of each user: weaker alignment for users who drift. Eq. (15), eq:adaptive_lambda.

    It never falls below `least` times lambda_max: the paper states the range 0.1 to 1 and leaves kappa open.
    """
    return lambda_max * torch.exp(-kappa * mean_drift).clamp(min=least)
