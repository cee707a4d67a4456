"""A scheme: how the weights of linear layers are stored in a checkpoint, or kept in memory.

Only linear layers of a model's blocks have a scheme. Embeddings and the language-model head stay in the model's dtype:
their rounding would show in every logit, and they are a small part of a large model.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from quire.executor.weights.readers import Shard
from quire.ops.backend import LinearWeight


class Part(NamedTuple):
    """A checkpoint's own linear layer, alone or inside a fused one.

    Attributes:
        name: the layer's, without `.weight`.
        out_features: the whole layer's outputs.
        shard: this rank's part of its weight [out, in]: some outputs (dimension 0), or some inputs (dimension 1).
    """

    name: str
    out_features: int
    shard: Shard


class TensorSource(Protocol):
    """Hands out tensors by name: a `WeightReader`, or a `ModelContext`, which puts them on its device."""

    def read(
        self, name: str, shape: tuple[int, ...], shard: Shard | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """See `WeightReader.read`."""
        ...


class LinearScheme(Protocol):
    """Reads the weights of linear layers. Biases are no part of a scheme: they are plain tensors in all of them."""

    def read_weight(self, source: TensorSource, parts: Sequence[Part], in_features: int) -> LinearWeight:
        """This rank's weight of layers with the same `in_features` inputs (of all ranks together), one after the other.

        [outputs of all parts, in], as the backend's `pack_linear` takes it.
        """
        ...
