"""Adapts checkpoints that fuse, transpose, pair or name tensors differently from the models here."""

import re
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from quire.executor.weights.readers import Shard, Stored, StoredRows, WeightReader

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")


class Pairs(NamedTuple):
    """Rows whose rotary embedding rotates neighbours (GPT-J order): the first `rotary_dim` of each head of `head_dim`.

    They are read as all first members, then all second ones (NeoX order). Attention is invariant to that, as long as
    queries and keys are alike.
    """

    head_dim: int
    rotary_dim: int


class Piece(NamedTuple):
    """The place of a model's layer in a checkpoint.

    Attributes:
        name: the stored layer's, without `.weight` or `.bias`; inside a decoder layer without that layer's prefix.
        first: the piece's first row (output) in each block.
        rows: its rows in each block; 0: the piece is the whole tensor.
        block: rows of a block; the stored tensor is `num_blocks` of them.
        is_transposed: the stored weight is [in, out].
        pairs: the pairing of neighbouring rows, if there is one.
    """

    name: str
    first: int = 0
    rows: int = 0
    block: int = 0
    num_blocks: int = 1
    is_transposed: bool = False
    pairs: Pairs | None = None


def fused(name: str, *rows: int, num_blocks: int = 1, is_transposed: bool = False) -> list[Piece]:
    """Lists the pieces of a fused layer, which have `rows` rows in each block, one after another."""
    block = sum(rows)
    return [Piece(name, sum(rows[:i]), count, block, num_blocks, is_transposed) for i, count in enumerate(rows)]


class RearrangedWeights:
    def __init__(
        self,
        reader: WeightReader,
        pieces: Mapping[str, Piece],
        *,
        layer: str = "model.layers.{}",
        ends: Mapping[str, str] | None = None,
    ) -> None:
        """`pieces` are those of each decoder layer, by the name in the layer; `layer` is the layers' stored prefix.

        The layer's number takes the place of `{}`, in the prefix or in the pieces' names.

        `ends` maps the names outside the layers. Names that are not listed are looked for as they are.
        """
        self._reader = reader
        self._pieces = pieces
        self._layer = layer
        self._ends = ends or {}

    def read(
        self, name: str, shape: tuple[int, ...], shard: Shard | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        module, _, kind = name.rpartition(".")
        piece = self._piece(module)
        stored = piece._replace(name=f"{piece.name}.{kind}")
        rows = self._read(stored, shape, shard, dtype)
        return rows if piece.pairs is None else _unpaired(rows, piece.pairs)

    def find(self, name: str, otherwise: Stored | None = None) -> Stored | None:
        return self._reader.find(self._stored_name(name), otherwise)

    def locate(self, layer: str, out_features: int) -> StoredRows:
        piece = self._piece(layer)
        if not piece.rows and piece.pairs is None:
            return self._reader.locate(piece.name, out_features)
        index = torch.arange(piece.block * piece.num_blocks if piece.rows else out_features)
        if piece.rows:
            index = index.view(piece.num_blocks, piece.block)[:, piece.first : piece.first + piece.rows].flatten()
        if piece.pairs is not None:
            index = _unpaired(index, piece.pairs)
        return StoredRows(self._reader, piece.name, max(len(index), piece.block * piece.num_blocks), index)

    def _stored_name(self, name: str) -> str:
        module, _, kind = name.rpartition(".")
        return f"{self._piece(module).name}.{kind}"

    def _piece(self, module: str) -> Piece:
        """Returns the piece of a model's module, by its whole name."""
        match = _LAYER.fullmatch(module)
        if match is None:
            return Piece(self._ends.get(module, module))
        index, inner = match.groups()
        piece = self._pieces.get(inner, Piece(inner))
        return piece._replace(name=f"{self._layer}.{piece.name}".format(index))

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]] | None:
        return self._reader.shapes

    def are_same(self, name: str, other: str) -> bool:
        return self._reader.are_same(*(self._stored_name(each) for each in (name, other)))

    def close(self) -> None:
        self._reader.close()

    def _read(self, piece: Piece, shape: tuple[int, ...], shard: Shard | None, dtype: torch.dtype | None) -> Tensor:
        if not piece.rows:
            return self._read_stored(piece, shape, shard, dtype)
        whole = (piece.block * piece.num_blocks, *shape[1:])
        start, stop = (shard.start, shard.stop) if shard is not None and shard.dim == 0 else (0, shape[0])
        if piece.num_blocks == 1:
            rows = self._read_stored(piece, whole, Shard(0, piece.first + start, piece.first + stop), dtype)
        else:
            blocks = Shard(0, start // piece.rows * piece.block, -(-stop // piece.rows) * piece.block)
            rows = self._read_stored(piece, whole, blocks, dtype).unflatten(0, (-1, piece.block))
            rows = rows[:, piece.first : piece.first + piece.rows].flatten(0, 1)
            rows = rows[start % piece.rows :][: stop - start]
        if shard is not None and shard.dim == 1:
            rows = rows[:, shard.start : shard.stop]
        return rows.contiguous()

    def _read_stored(
        self, piece: Piece, shape: tuple[int, ...], shard: Shard | None, dtype: torch.dtype | None
    ) -> Tensor:
        if not piece.is_transposed or len(shape) < 2:
            return self._reader.read(piece.name, shape, shard, dtype)
        turned = None if shard is None else shard._replace(dim=1 - shard.dim)
        return self._reader.read(piece.name, shape[::-1], turned, dtype).t().contiguous()


def _unpaired(rows: Tensor, pairs: Pairs) -> Tensor:
    heads = rows.unflatten(0, (-1, pairs.head_dim))
    turned = heads[:, : pairs.rotary_dim].unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
    return torch.cat((turned, heads[:, pairs.rotary_dim :]), dim=1).flatten(0, 1)
