"""What comparisons with other libraries share: float64, and weights that agree as far as the module's EXACT says."""

import pytest
import torch
from agreement import apart
from torch import Tensor


@pytest.fixture
def double():
    """Everything made in the test is float64; what tests share stays float32."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def same(request):
    """Asserts that weights agree, relative to the largest of them, and keeps the difference for the test report."""

    def check(found: dict[str, Tensor], expected: dict[str, Tensor], limit: float = request.module.EXACT) -> None:
        assert found.keys() == expected.keys()
        assert max(float(tensor.detach().abs().max()) for tensor in expected.values()) > 0
        request.node.user_properties.append(("largest relative difference", worst := apart(found, expected)))
        assert worst < limit

    return check
