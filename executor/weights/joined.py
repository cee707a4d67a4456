"""Joins tensors that a checkpoint stores in pieces of some rows, `name.shard_0.weight` and so on."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from quire.core.errors import ModelLoadError
from quire.executor.weights.readers import Shard, Stored, StoredRows, WeightReader, shard_range, shard_shape


class JoinedWeights:
    """A reader that joins such pieces. A tensor under its own name is read unchanged."""

    def __init__(self, reader: WeightReader) -> None:
        self._reader = reader

    def read(
        self, name: str, shape: tuple[int, ...], shard: Shard | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        pieces = list(self._pieces(name))
        if not pieces:
            return self._reader.read(name, shape, shard, dtype)
        num_rows = sum(piece.shape[0] for _, piece in pieces)
        if num_rows != shape[0]:
            raise ModelLoadError(
                f"{name} of the checkpoint has {num_rows} rows in {len(pieces)} pieces; config.json says {shape[0]}."
            )
        wanted, columns = shard_range(shard, 0, shape), shard if shard is not None and shard.dim else None
        joined: Tensor | None = None
        first = 0  # of a piece
        for piece_name, piece in pieces:
            rows = range(max(wanted.start, first), min(wanted.stop, first + piece.shape[0]))
            if rows:
                own = columns or Shard(0, rows.start - first, rows.stop - first)
                part = self._reader.read(piece_name, piece.shape, own, dtype)
                if joined is None:  # allocated once, because it may be most of the model
                    joined = torch.empty(shard_shape(shape, shard), dtype=part.dtype, device=part.device)
                joined[rows.start - wanted.start : rows.stop - wanted.start] = part
            first += piece.shape[0]
        return self._reader.read(pieces[0][0], pieces[0][1].shape, Shard(0, 0, 0), dtype) if joined is None else joined

    def find(self, name: str, otherwise: Stored | None = None) -> Stored | None:
        pieces = list(self._pieces(name))
        if not pieces:
            return self._reader.find(name, otherwise)
        return Stored((sum(piece.shape[0] for _, piece in pieces), *pieces[0][1].shape[1:]), pieces[0][1].dtype)

    def locate(self, layer: str, out_features: int) -> StoredRows:
        return self._reader.locate(layer, out_features)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]] | None:
        return self._reader.shapes

    def are_same(self, name: str, other: str) -> bool:
        return self._reader.are_same(name, other)

    def close(self) -> None:
        self._reader.close()

    def _pieces(self, name: str) -> Iterator[tuple[str, Stored]]:
        module, _, kind = name.rpartition(".")
        number = 0
        while (found := self._reader.find(f"{module}.shard_{number}.{kind}")) is not None:
            yield f"{module}.shard_{number}.{kind}", found
            number += 1
