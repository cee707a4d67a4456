"""The interface of what hands out a checkpoint's tensors, each rank only its shard. Knows names, not models."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from quire.core.errors import ModelLoadError


class MissingTensorError(ModelLoadError):
    """The checkpoint has no tensor of a name."""


class Shard(NamedTuple):
    """The part `start:stop` of dimension `dim`."""

    dim: int
    start: int
    stop: int


class Stored(NamedTuple):
    """A tensor as it lies in a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class StoredRows(NamedTuple):
    """Where the outputs of a linear layer lie in a checkpoint, whatever the format of its weight.

    Attributes:
        reader: hands out the stored layer's tensors as they lie in the checkpoint.
        name: the stored layer's.
        out_features: all of its outputs.
        outputs: [outputs of the model's layer] int64: which of them are the model's; None: all in order.
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
        """The tensor (or its shard) on the CPU, in `dtype` or else the reader's, free to be kept or changed.

        `shape` is the whole tensor's, as the model expects it. A tensor of integers is read only as its own dtype.

        Raises:
            MissingTensorError: no such tensor.
            ModelLoadError: another shape, or a file that cannot be read.
        """
        ...

    def find(self, name: str, otherwise: Stored | None = None) -> Stored | None:
        """What the checkpoint has under `name`: None, if nothing; `otherwise`, if there is a tensor of any name."""
        ...

    def locate(self, layer: str, out_features: int) -> StoredRows:
        """Where the checkpoint has the linear layer that the model calls `layer`.

        Raises:
            ModelLoadError: the layer's numbers are not rows of one stored layer.
        """
        ...


class WeightReader(TensorSource, Protocol):
    """Tensors by checkpoint name."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]] | None:
        """The shapes of all tensors; None if there is a tensor of any name."""
        ...

    def are_same(self, name: str, other: str) -> bool:
        """Whether the checkpoint has tensors of both names, with the same shape, dtype and numbers."""
        ...

    def close(self) -> None:
        """Unmaps the files and ends the progress bar."""
        ...


def shard_shape(shape: tuple[int, ...], shard: Shard | None) -> tuple[int, ...]:
    """The shape of a shard of a tensor."""
    return tuple(len(shard_range(shard, dim, shape)) for dim in range(len(shape)))


def shard_index(shard: Shard) -> tuple[slice, ...]:
    """The index that takes a shard out of its tensor."""
    return (slice(None),) * shard.dim + (slice(shard.start, shard.stop),)


def shard_range(shard: Shard | None, dim: int, shape: tuple[int, ...]) -> range:
    """The indices of dimension `dim` that a shard has."""
    return range(shard.start, shard.stop) if shard is not None and shard.dim == dim else range(shape[dim])
