"""What the model runner sees of a model."""

from typing import NamedTuple, Protocol

from torch import Tensor

from quire.executor.layers.attention import Wanted
from quire.executor.layers.context import ModelContext
from quire.ops.backend import AttentionBatch

__all__ = ["GivenRows", "Model", "ModelContext", "Wanted"]


class GivenRows(NamedTuple):
    """Rows to be taken in the place of the embeddings of some tokens of a step.

    Attributes:
        places: [num_rows] int64; indices into the step's tokens.
        rows: [num_rows, hidden], of the model's type.
    """

    places: Tensor
    rows: Tensor


class Model(Protocol):
    """A decoder on one rank. All sizes are this rank's own."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_caches: list[Tensor],
        batch: AttentionBatch,
        given: GivenRows | None = None,
        wanted: Wanted | None = None,
    ) -> Tensor:
        """Hidden states of one step, [num_tokens, hidden], or [num_wanted, hidden] of the tokens that are wanted.

        Writes the new keys and values of all tokens into `kv_caches`.
        `token_ids` and `positions` are [num_tokens] int64; `kv_caches` has one tensor a layer. Tokens that `given`
        has rows for are embedded as those, whatever their ids.
        """
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """`hidden` [num_sampled, hidden] → logits [num_sampled, vocab_size]: the whole vocabulary, on every rank."""
        ...
