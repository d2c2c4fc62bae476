"""Which prototype each client belongs to."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def nearest(z: Float[Tensor, "U d_z"], v: Float[Tensor, "K d_z"]) -> Int[Tensor, " U"]:
    """The nearest prototype of each embedding, the first of equally near ones. A_k of Eq. (9), eq:fedkmeans.

    Called on the client with its clean embedding: after the noise, which in 64 dimensions is several times longer than
    the embedding, a server could only guess. A row that is not finite gets 0; its upload contributes nothing.
    """
    return torch.cdist(torch.nan_to_num(z), v, compute_mode="donot_use_mm_for_euclid_dist").argmin(dim=-1)
