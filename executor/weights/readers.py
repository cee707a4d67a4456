"""The interface of what hands out a checkpoint's tensors, each rank only its shard. Knows names, not models."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Shard(NamedTuple):
    """The part `start:stop` of dimension `dim`."""

    dim: int
    start: int
    stop: int


class WeightReader(Protocol):
    """Tensors by checkpoint name."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]] | None:
        """The shapes of all tensors; None if there is a tensor of any name."""
        ...

    def read(
        self, name: str, shape: tuple[int, ...], shard: Shard | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """The tensor (or its shard) on the CPU, in `dtype` or else the reader's, free to be kept or changed.

        `shape` is the whole tensor's, as the model expects it. A tensor of integers is read only as its own dtype.

        Raises:
            ModelLoadError: no such tensor, another shape, or a file that cannot be read.
        """
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
