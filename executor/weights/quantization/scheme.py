"""A scheme: how the weights of linear layers are stored in a checkpoint, or kept in memory.

The linear layers of a model's blocks have a scheme, and so have the language-model head, which a small model reads for
longer than its layers, and the embedding, which may be the head's weight.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from quire.executor.weights.readers import Shard, TensorSource
from quire.ops.backend import LinearWeight


class Part(NamedTuple):
    """A checkpoint's own linear layer, alone or inside a fused one.

    Attributes:
        name: the layer's, without `.weight`.
        out_features: the whole layer's outputs.
        shard: this rank's part of its weight [out, in]: some outputs (dimension 0), or some inputs (dimension 1).
        mixture: the name of the experts of which one has the layer; empty for all other layers.
    """

    name: str
    out_features: int
    shard: Shard
    mixture: str = ""


class LinearScheme(Protocol):
    """Reads the weights of linear layers. Biases are no part of a scheme: they are plain tensors in all of them."""

    def read_weight(self, source: TensorSource, part: Part, in_features: int) -> LinearWeight:
        """This rank's weight [out, in] of a layer with `in_features` inputs (of all ranks together)."""
        ...

    def read_numbers(self, source: TensorSource, part: Part, in_features: int, dtype: torch.dtype) -> Tensor:
        """This rank's weight of a layer that is used in another way than by a linear product, as plain numbers."""
        ...

    def read_rows(self, source: TensorSource, part: Part, in_features: int) -> LinearWeight:
        """This rank's rows of an embedding or a language-model head, as the checkpoint has them."""
        ...

    def for_head(self, rows: LinearWeight, part: Part) -> LinearWeight:
        """What `read_rows` gave of `part`, as a head keeps it; and an embedding, if its weight is the head's."""
        ...
