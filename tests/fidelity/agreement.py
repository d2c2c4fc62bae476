"""When two sets of weights agree: how far apart they are, and float64 for what is made in a test."""

import pytest
from torch import Tensor

exactly = pytest.mark.usefixtures("double")


def apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference, relative to the largest weight expected."""
    scale = max(float(tensor.detach().abs().max()) for tensor in expected.values())
    return max(float((found[name] - tensor).detach().abs().max()) for name, tensor in expected.items()) / scale
