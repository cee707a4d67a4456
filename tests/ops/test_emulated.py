"""Levels that this processor does not have, with their instructions in software: that they use them, and to the bit.

The other tests of operations run at these levels, too (`levels.TESTED`).
"""

import ctypes

import pytest
import torch

from tests.ops.levels import EMULATED_AMX, EMULATED_AVX_VNNI, Level
from tests.ops.test_quantized_linear import weight_of

KINDS = ["int8", "int4", "line"]
SHAPES = [(70, 96, 32), (50, 192, 64), (40, 256, 128), (33, 192, 192), (96, 1024, 1024)]
"""(out, in, group), where blocks fill the tile registers, or half of them."""


@pytest.fixture(params=EMULATED_AMX, ids=lambda level: level.name)
def amx(request: pytest.FixtureRequest) -> Level:
    return request.param


def products(level: Level, kind: str) -> int:
    """How many instructions multiplied `kind`, bfloat or byte, in this process so far."""
    count = level.kernels()[f"emulated_{kind}_products"]
    count.restype = ctypes.c_long
    return count()


def test_tiles_multiply_bfloats(amx: Level) -> None:
    ops, before = amx.backend(), products(amx, "bfloat")
    ops.linear(torch.randn(32, 64).bfloat16(), ops.pack_linear(torch.randn(96, 64).bfloat16()))
    assert products(amx, "bfloat") - before == 3 * 2 * 2 * 2  # panels, their halves, tiles of rows, and of inputs


@pytest.mark.parametrize("kind", KINDS)
def test_tiles_multiply_bytes_of_many_rows(amx: Level, kind: str) -> None:
    ops = amx.backend(8)
    packed = ops.pack_linear(weight_of(kind, 96, 128, 32))
    for rows, tiles in {15: 0, 16: 1, 33: 3}.items():
        before = products(amx, "byte")
        ops.linear(torch.randn(rows, 128).bfloat16(), packed)
        assert products(amx, "byte") - before == 3 * 2 * tiles * 4


@pytest.mark.parametrize("other", EMULATED_AVX_VNNI, ids=lambda level: level.name)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tiles_have_the_bits_of_vectors(amx: Level, other: Level, kind: str, dtype: torch.dtype) -> None:
    """The two levels round activations alike, and sums of integers are exact."""
    ops, vectors = amx.backend(8), other.backend(8)
    for out, size, group in SHAPES:
        weight, x = weight_of(kind, out, size, group, is_rich=True), torch.randn(200, size).to(dtype)
        packed, theirs = ops.pack_linear(weight), vectors.pack_linear(weight)
        for rows in (1, 3, 16, 31, 32, 200):
            assert torch.equal(ops.linear(x[:rows], packed), vectors.linear(x[:rows], theirs)), (size, group, rows)
