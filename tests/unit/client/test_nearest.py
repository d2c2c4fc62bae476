"""Each device finds its nearest prototype."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from protofed.client.upload import nearest


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_each_upload_goes_to_its_nearest_prototype(n_uploads, n_prototypes, seed):
    rng = torch.Generator().manual_seed(seed)
    z, v = torch.randn(n_uploads, 4, generator=rng), torch.randn(n_prototypes, 4, generator=rng)
    by_hand = [min(range(n_prototypes), key=lambda k, z_u=z_u: (z_u - v[k]).square().sum().item()) for z_u in z]
    assert nearest(z, v).tolist() == by_hand


def test_the_first_of_equally_near_prototypes_wins():
    assert nearest(torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])).tolist() == [0]


def test_a_batch_gives_what_single_clients_get():
    rng = torch.Generator().manual_seed(0)
    z, v = torch.randn(300, 64, generator=rng), torch.randn(16, 64, generator=rng)
    assert nearest(z, v).tolist() == [nearest(row[None], v).item() for row in z]


def test_a_row_that_is_not_finite_harms_nobody_else():
    v = torch.eye(3)
    z = torch.tensor([[0.0, 1.0, 0.0], [math.nan, math.inf, 0.0], [0.0, 0.0, 1.0]])
    found = nearest(z, v)
    assert (found[0], found[2]) == (1, 2)
    assert 0 <= found[1] < 3
