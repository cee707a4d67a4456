"""Layers whose codes are integers, with activations of two bytes: what becomes of these, and of products and sums.

The kernels make integers of 16 bits of them, by a power of two for each block of inputs (`kernels/words.h`).
"""

import pytest
import torch
from torch import Tensor

from quire.ops.cpu.native import NativeBackend
from quire.ops.quantized import QuantizedWeight, dequantize
from tests.ops.test_quantized_linear import weight_of

torch.set_num_threads(1)

BLOCK = 128
"""Most inputs of a block; fewer if the weight's groups have fewer."""
EXACT = {torch.bfloat16: 2**-7, torch.float16: 2**-4}
"""Numbers of so much of their block's largest, or more, stay what they are."""
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Half a digit of the result."""
KINDS = ["int8", "int4", "line", "two's complement"]


def identity(size: int, group: int) -> QuantizedWeight:
    codes = torch.eye(size).to(torch.int8)
    return QuantizedWeight(codes, torch.ones(size, size // group))


def blocks(x: Tensor, group: int) -> list[Tensor]:
    return [block for part in x.split(group, -1) for block in part.split(BLOCK, -1)]


def product(x: Tensor, weight: QuantizedWeight) -> Tensor:
    return x.double() @ dequantize(weight).double().T


@pytest.mark.parametrize("dtype", list(EXACT))
@pytest.mark.parametrize(("size", "group"), [(64, 32), (300, 300), (60, 12), (33, 33), (512, 256)])
def test_what_becomes_of_activations(native: NativeBackend, dtype: torch.dtype, size: int, group: int) -> None:
    x = (torch.randn(9, size) * torch.randn(9, size).mul(3).exp()).to(dtype)
    got = native.linear(x, native.pack_linear(identity(size, group)))
    for given, taken in zip(blocks(x, group), blocks(got, group), strict=True):
        largest = given.abs().amax(-1, keepdim=True)
        is_large = given.abs() >= EXACT[dtype] * largest
        assert torch.equal(given[is_large], taken[is_large])
        error = (given.double() - taken.double()).abs() / largest.double()
        assert error.max().item() <= 2**-15


@pytest.mark.parametrize("dtype", list(EXACT))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_rich", [False, True], ids=["scales", "offsets and order"])
def test_a_row_is_right_and_the_same_in_any_batch(
    native: NativeBackend, kind: str, dtype: torch.dtype, is_rich: bool
) -> None:
    for out, size, group in [(70, 96, 32), (257, 528, 16), (33, 24, 12), (64, 2100, 700), (40, 66, 6)]:
        weight = weight_of(kind, out, size, group, is_rich=is_rich)
        packed = native.pack_linear(weight)
        x = torch.randn(110, size).to(dtype)
        together = native.linear(x, packed)
        expected = product(x, weight)
        slack = 2e-5 * expected.abs().max().item()
        torch.testing.assert_close(together.double(), expected, rtol=ROUNDING[dtype], atol=slack)
        for num_tokens in (*range(1, 27), 40):
            assert torch.equal(native.linear(x[:num_tokens], packed), together[:num_tokens]), num_tokens
        assert torch.equal(native.linear(x[77:78], packed), together[77:78])


@pytest.mark.parametrize("dtype", list(EXACT))
def test_a_large_number_spoils_its_block_alone(native: NativeBackend, dtype: torch.dtype) -> None:
    weight = weight_of("int8", 40, 256, 256)
    x = torch.randn(3, 256).to(dtype)
    x[:, 5] = 30000
    weight.codes[:, :BLOCK] = 0
    got, expected = native.linear(x, native.pack_linear(weight)).double(), product(x, weight)
    torch.testing.assert_close(got, expected, rtol=ROUNDING[dtype], atol=2e-5 * expected.abs().max().item())


def test_the_largest_sums_fit(native: NativeBackend) -> None:
    """Each product of a block has the same sign, and is as large as products can be."""
    weight = QuantizedWeight(torch.full((5, 3 * BLOCK), -128, dtype=torch.int8), torch.ones(5, 1))
    x = torch.full((30, 3 * BLOCK), -255.0, dtype=torch.bfloat16)
    expected = torch.full((30, 5), 255.0 * 128 * 3 * BLOCK).bfloat16()
    assert torch.equal(native.linear(x, native.pack_linear(weight)), expected)


@pytest.mark.parametrize("magnitude", [0.0, 1e-39, 2.0**-120, 1e-20, 1e30])
def test_any_magnitude(native: NativeBackend, magnitude: float) -> None:
    weight = weight_of("int4", 40, 64, 32, is_rich=True)
    x = (torch.randn(7, 64) * magnitude).bfloat16()
    got, expected = native.linear(x, native.pack_linear(weight)).double(), product(x, weight)
    slack = max(2e-5 * expected.abs().max().item(), 1e-37)
    torch.testing.assert_close(got, expected, rtol=2**-8, atol=slack)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_row_without_a_number_has_no_result(native: NativeBackend, kind: str, wrong: float) -> None:
    """And the other rows have theirs."""
    packed, x = native.pack_linear(weight_of(kind, 40, 64, 32, is_rich=True)), torch.randn(9, 64).bfloat16()
    right = native.linear(x, packed)
    x[4, 33] = wrong
    got = native.linear(x, packed)
    assert not got[4].isfinite().any()
    others = [row for row in range(9) if row != 4]
    assert torch.equal(got[others], right[others])


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_the_number_of_threads_does_not_show(native: NativeBackend, kind: str) -> None:
    packed, x = native.pack_gated_linear(weight_of(kind, 1000, 320, 32)), torch.randn(70, 320).bfloat16()
    one = [native.gated_linear(x[:rows], packed) for rows in (1, 2, 70)]
    torch.set_num_threads(4)
    try:
        for expected in one:
            assert torch.equal(native.gated_linear(x[: len(expected)], packed), expected)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", list(EXACT))
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_gated_layer_is_the_plain_one_activated(native: NativeBackend, kind: str, dtype: torch.dtype) -> None:
    weight = weight_of(kind, 2 * 75, 64, 32, is_rich=True)
    bias, x = torch.randn(2 * 75).to(dtype), torch.randn(33, 64).to(dtype)
    got = native.gated_linear(x, native.pack_gated_linear(weight, bias))
    expected = native.activate_and_mul(native.linear(x, native.pack_linear(weight, bias)))
    # Equal, unless a processor that cannot convert float16 computes all of it in float32.
    slack = 0 if dtype == torch.bfloat16 else 2**-8
    torch.testing.assert_close(got, expected, rtol=slack, atol=slack)
