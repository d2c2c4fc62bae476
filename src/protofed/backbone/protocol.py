"""What the rest of ProtoFed needs of a sequential recommender."""

from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor


@runtime_checkable
class Backbone(Protocol):
    """A frozen or trainable f_theta: tokens in, hidden states out, scores by inner product with item rows."""

    def embed(self, items: Int[Tensor, "..."]) -> Float[Tensor, "... d"]:
        """Rows of items; one without a trained row gets the mean row."""
        ...

    def hidden(
        self, tokens: Int[Tensor, "B L"], prompt: Float[Tensor, "B L_p d"] | None = None
    ) -> Float[Tensor, "B L d"]:
        """The hidden state at every token, for training."""
        ...

    def last_hidden(
        self, tokens: Int[Tensor, "B L"], prompt: Float[Tensor, "B L_p d"] | None = None
    ) -> Float[Tensor, "B d"]:
        """The hidden state at the last token only, for inference."""
        ...

    def scores(self, hidden: Float[Tensor, "B d"], n_items: int) -> Float[Tensor, "B I"]:
        """Inner products with items 0 .. n_items - 1."""
        ...
