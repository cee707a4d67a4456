"""The interface of readers of a checkpoint's tensors, each rank only its shards. They know names, not models."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from quire.core.errors import ModelLoadError


class MissingTensorError(ModelLoadError):
    """The checkpoint has no tensor with this name."""


class Shard(NamedTuple):
    """The part `start:stop` of dimension `dim`."""

    dim: int
    start: int
    stop: int


class Stored(NamedTuple):
    """A tensor's shape and dtype in a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class StoredRows(NamedTuple):
    """The place of a linear layer's outputs in a checkpoint, in any format of its weight.

    Attributes:
        reader: hands out the stored layer's tensors as they lie in the checkpoint.
        name: the stored layer's.
        out_features: all of its outputs.
        outputs: [outputs of the model's layer] int64: their indices in the stored layer; None: all in order.
    """

    reader: "TensorSource"
    name: str
    out_features: int
    outputs: Tensor | None = None


class TensorSource(Protocol):
    """Hands out tensors by name: a `WeightReader`, or a `ModelContext`, which puts them on its device."""

    def read(
        self, name: str, shape: tuple[int, ...], shard: Shard | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Reads the tensor (or its shard) to the CPU, in `dtype` or else the reader's. The caller owns it.

        `shape` is the whole tensor's, as the model expects it. A tensor of integers is read only as its own dtype.

        Raises:
            MissingTensorError: no such tensor.
            ModelLoadError: another shape, or a file that cannot be read.
        """
        ...

    def find(self, name: str, otherwise: Stored | None = None) -> Stored | None:
        """Finds the tensor `name`; None, if there is none; `otherwise`, if a tensor of any name exists."""
        ...

    def locate(self, layer: str, out_features: int) -> StoredRows:
        """Locates the linear layer that the model calls `layer`.

        Raises:
            ModelLoadError: the layer's weight is not rows of one stored layer.
        """
        ...


class WeightReader(TensorSource, Protocol):
    """Tensors by checkpoint name."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]] | None:
        """The shapes of all tensors; None if there is a tensor of any name."""
        ...

    def are_same(self, name: str, other: str) -> bool:
        """Returns True if the checkpoint has both tensors, with the same shape, dtype and elements."""
        ...

    def close(self) -> None:
        """Unmaps the files and ends the progress bar."""
        ...


def shard_shape(shape: tuple[int, ...], shard: Shard | None) -> tuple[int, ...]:
    """Returns the shape of a shard of a tensor."""
    return tuple(len(shard_range(shard, dim, shape)) for dim in range(len(shape)))


def shard_index(shard: Shard) -> tuple[slice, ...]:
    """Returns the index that takes a shard out of its tensor."""
    return (slice(None),) * shard.dim + (slice(shard.start, shard.stop),)


def shard_range(shard: Shard | None, dim: int, shape: tuple[int, ...]) -> range:
    """Returns the indices of dimension `dim` that a shard has."""
    return range(shard.start, shard.stop) if shard is not None and shard.dim == dim else range(shape[dim])
