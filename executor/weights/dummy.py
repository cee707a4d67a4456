"""Random weights, for runs that only need a model's shape."""

import hashlib
import math

import torch
from torch import Tensor

from quire.executor.weights.freed_memory import FreedMemory
from quire.executor.weights.readers import Shard, Stored, StoredRows, shard_index, shard_range

_MEAN_BYTE = 100
"""The mean byte of packed weights. As exponents with a bias of 127, such bytes are small values."""


class DummyWeights:
    """Random weights, which depend on the seed and not on the number of ranks.

    Element i of a tensor is element (i + offset) of one block of normally distributed values, repeated. The offset
    comes from the tensor's name. The block's length is prime, so that no two rows of a weight are alike. Values are
    scaled by the last dimension, a layer's inputs. One-dimensional tensors are ones if they are norms or factors, else
    zeros.
    """

    _PERIOD = 1_048_573

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        self._dtype = dtype
        self._freed = FreedMemory()
        self._block = torch.randn(self._PERIOD, generator=torch.Generator().manual_seed(seed))

    @property
    def shapes(self) -> None:
        return None

    def read(
        self, name: str, shape: tuple[int, ...], shard: Shard | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        dtype = dtype or self._dtype
        if len(shape) < 2:
            full = torch.full(shape, 1.0 if _is_factor(name) else 0.0, dtype=dtype)
            return full if shard is None else full[shard_index(shard)].clone()
        # Read as [outer, rows, inner]: an outer slice is one run of the sequence, cut where the shard cuts its rows.
        dim = 0 if shard is None else shard.dim
        rows, inner = shard_range(shard, dim, shape), math.prod(shape[dim + 1 :])
        offset = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
        scaled = self._block * shape[-1] ** -0.5 if dtype.is_floating_point else self._block * 4 + _MEAN_BYTE
        scaled = scaled.to(dtype)
        out = torch.empty(math.prod(shape[:dim]), len(rows) * inner, dtype=dtype)
        for index, part in enumerate(out):
            first = offset + (index * shape[dim] + rows.start) * inner
            self._repeat(scaled, first % self._PERIOD, part)
        return self._freed.counted(out).view(*shape[:dim], len(rows), *shape[dim + 1 :])

    def find(self, name: str, otherwise: Stored | None = None) -> Stored | None:
        return otherwise

    def locate(self, layer: str, out_features: int) -> StoredRows:
        return StoredRows(self, layer, out_features)

    def are_same(self, name: str, other: str) -> bool:
        return name == other

    def close(self) -> None:
        """Nothing to close."""

    def _repeat(self, block: Tensor, start: int, out: Tensor) -> None:
        done = 0
        while done < len(out):
            part = block[start : start + len(out) - done]
            out[done : done + len(part)] = part
            done, start = done + len(part), 0


def _is_factor(name: str) -> bool:
    """Returns True for a vector that multiplies normalized values (`model.norm.weight`) or all of them
    (`layer_scalar`).
    """
    layer, _, kind = name.rpartition(".")
    layer = layer.rpartition(".")[2]
    return kind.endswith("scalar") or (kind == "weight" and ("norm" in layer or layer.startswith("ln")))
