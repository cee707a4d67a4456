"""The interface of a scheme: how the weights of linear layers are stored in a checkpoint, or kept in memory.

The linear layers of a model's blocks have a scheme. So have the language-model head, which a small model spends more
time reading than its layers, and the embedding, which may be the head's weight.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from quire.executor.weights.readers import Shard, TensorSource
from quire.ops.linear import LinearWeight


class LinearPart(NamedTuple):
    """A linear layer of a checkpoint, alone or inside a fused one.

    Attributes:
        name: the layer's, without `.weight`.
        out_features: the whole layer's outputs.
        shard: this rank's part of its weight [out, in]: some outputs (dimension 0), or some inputs (dimension 1).
        mixture: the name of the routed experts that the layer belongs to; empty for all other layers.
    """

    name: str
    out_features: int
    shard: Shard
    mixture: str = ""


class LinearScheme(Protocol):
    """Reads the weights of linear layers. A scheme does not cover biases: they are plain tensors in all of them."""

    def read_weight(self, source: TensorSource, part: LinearPart, in_features: int) -> LinearWeight:
        """Reads this rank's weight [out, in] of a layer with `in_features` inputs (of all ranks together)."""
        ...

    def read_dequantized(self, source: TensorSource, part: LinearPart, in_features: int, dtype: torch.dtype) -> Tensor:
        """Reads this rank's weight, dequantized, of a layer that is not used as a linear product."""
        ...

    def read_rows(self, source: TensorSource, part: LinearPart, in_features: int) -> LinearWeight:
        """Reads this rank's rows of an embedding or a language-model head, as the checkpoint has them."""
        ...

    def for_head(self, rows: LinearWeight, part: LinearPart) -> LinearWeight:
        """Converts the result of `read_rows` to the head's format. An embedding that is also the head's weight takes
        it, too.
        """
        ...
