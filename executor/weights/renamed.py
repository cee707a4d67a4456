"""Hands out a checkpoint's tensors under other names."""

from collections.abc import Mapping

import torch
from torch import Tensor

from quire.executor.weights.readers import Shard, Stored, StoredRows, WeightReader


class RenamedWeights:
    """A `WeightReader` whose names begin otherwise than those of `reader`: `prefixes` are by the name's beginning."""

    def __init__(self, reader: WeightReader, prefixes: Mapping[str, str]) -> None:
        self._reader = reader
        self._prefixes = prefixes

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]] | None:
        return self._reader.shapes

    def read(
        self, name: str, shape: tuple[int, ...], shard: Shard | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        return self._reader.read(self._stored(name), shape, shard, dtype)

    def find(self, name: str, otherwise: Stored | None = None) -> Stored | None:
        return self._reader.find(self._stored(name), otherwise)

    def locate(self, layer: str, out_features: int) -> StoredRows:
        return self._reader.locate(self._stored(f"{layer}.").removesuffix("."), out_features)

    def are_same(self, name: str, other: str) -> bool:
        return self._reader.are_same(self._stored(name), self._stored(other))

    def close(self) -> None:
        self._reader.close()

    def _stored(self, name: str) -> str:
        for prefix, stored in self._prefixes.items():
            if name.startswith(prefix):
                return stored + name.removeprefix(prefix)
        return name
