"""A model with other weights for the length of one question: nothing of the model is copied or changed."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from torch import Tensor, nn
from torch.func import functional_call

from protofed.backbone.sasrec import SASRec

T = TypeVar("T")


def lending(model: SASRec, weights: Mapping[str, Tensor], ask: Callable[[], T]) -> T:
    """What `ask` gives while the model has these weights and buffers. Shapes may differ from the model's own."""
    lent = {f"model.{name}": weight.to(model.items.device) for name, weight in weights.items()}
    answer: T = functional_call(_Asking(model, ask), lent, ())
    return answer


class _Asking(nn.Module):
    """A question about a model as the `forward` that `functional_call` wants: weights are replaced around a call."""

    def __init__(self, model: SASRec, ask: Callable[[], object]) -> None:
        super().__init__()
        self.model, self.ask = model, ask

    def forward(self) -> object:
        return self.ask()
