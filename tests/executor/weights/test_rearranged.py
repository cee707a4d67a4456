"""Fused, transposed and paired tensors, whole and by shards."""

import pytest
import torch
from torch import Tensor

from quire.executor.weights.readers import Shard, shard_index, shard_shape
from quire.executor.weights.rearranged import Pairs, Piece, RearrangedWeights, fused


class Stored:
    """A `WeightReader` of given tensors."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def read(
        self, name: str, shape: tuple[int, ...], shard: Shard | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        tensor = self.tensors[name]
        assert tensor.shape == shape
        got = tensor if shard is None else tensor[shard_index(shard)]
        assert got.shape == shard_shape(shape, shard), "a shard outside the tensor"
        return got

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def close(self) -> None:
        self.tensors = {}


WHOLE = torch.arange(24 * 6).view(24, 6)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("num_blocks", [1, 3])
@pytest.mark.parametrize("shard", [None, Shard(0, 4, 8), Shard(1, 2, 5)])
def test_pieces_of_a_fused_layer(shard: Shard | None, num_blocks: int, is_transposed: bool) -> None:
    counts = (12, 8, 4) if num_blocks == 1 else (4, 2, 2)
    pieces = fused("both", *counts, num_blocks=num_blocks, is_transposed=is_transposed)
    stored = Stored({"h.7.both.weight": WHOLE.t() if is_transposed else WHOLE, "h.7.both.bias": WHOLE[:, 0]})
    reader = RearrangedWeights(stored, dict(zip("qkv", pieces, strict=True)), layer="h.{}")
    blocks = WHOLE.view(num_blocks, -1, 6)
    first = 0
    for name, count in zip("qkv", counts, strict=True):
        expected = blocks[:, first : first + count].reshape(-1, 6)
        first += count
        if shard is not None and shard.dim == 0 and shard.stop > len(expected):
            continue
        got = reader.read(f"model.layers.7.{name}.weight", tuple(expected.shape), shard)
        assert torch.equal(got, expected if shard is None else expected[shard_index(shard)])
        assert got.is_contiguous()
        if shard is None or shard.dim == 0:
            bias = reader.read(f"model.layers.7.{name}.bias", (len(expected),), shard)
            assert torch.equal(bias, got[:, 0] if shard else expected[:, 0])


def test_neighbours_become_halves() -> None:
    piece = Piece("q", pairs=Pairs(head_dim=6, rotary_dim=4))
    reader = RearrangedWeights(Stored({"model.layers.0.q.weight": WHOLE}), {"q": piece})
    got = reader.read("model.layers.0.q.weight", (24, 6), Shard(0, 6, 18))
    assert (got[:, 0] // 6).tolist() == [6, 8, 7, 9, 10, 11, 12, 14, 13, 15, 16, 17]


def test_other_names() -> None:
    stored = Stored({"wte.weight": WHOLE, "h.3.ln.bias": WHOLE[0], "lm_head.weight": WHOLE})
    reader = RearrangedWeights(stored, {"norm": Piece("ln")}, layer="h.{}", ends={"model.embed_tokens": "wte"})
    assert reader.read("model.embed_tokens.weight", (24, 6)) is WHOLE
    assert reader.read("lm_head.weight", (24, 6)) is WHOLE
    assert torch.equal(reader.read("model.layers.3.norm.bias", (6,)), WHOLE[0])
    assert reader.shapes == {"wte.weight": (24, 6), "h.3.ln.bias": (6,), "lm_head.weight": (24, 6)}
    reader.close()
    assert not stored.tensors
