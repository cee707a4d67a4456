"""The form of weights of few bits, against a loop over its definition."""

import pytest
import torch

from quire.ops.backend import Backend
from quire.ops.experts import ExpertWeights
from quire.ops.quantized import QuantizedWeight, dequantize

OUT, IN, GROUP = 3, 12, 4


def random_weight(
    kind: str, out: int, size: int, group: int, *, has_offsets: bool = False, is_permuted: bool = False
) -> QuantizedWeight:
    """Of codes that are "table", or of a dtype's name."""
    generator = torch.Generator().manual_seed(0)
    table = None
    if kind == "table":
        codes = torch.randint(0, 256, (out, size // 2), generator=generator, dtype=torch.uint8)
        table = torch.randn(16, generator=generator)
    elif kind == "int8":
        codes = torch.randint(-128, 128, (out, size), generator=generator, dtype=torch.int8)
    else:
        codes = torch.randn(out, size, generator=generator).to(getattr(torch, kind))
    scales, offsets = torch.rand(2, out, size // group, generator=generator) / 100 + 0.001
    order = torch.randperm(size, generator=generator) if is_permuted else None
    return QuantizedWeight(codes, scales, table, offsets if has_offsets else None, order)


@pytest.mark.parametrize("kind", ["int8", "table", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize(("has_offsets", "is_permuted"), [(False, False), (True, True)])
def test_numbers_are_values_times_scales_and_offsets(kind: str, has_offsets: bool, is_permuted: bool) -> None:
    weight = random_weight(kind, OUT, IN, GROUP, has_offsets=has_offsets, is_permuted=is_permuted)
    assert weight.shape == (OUT, IN)
    assert weight.group_size == GROUP
    numbers = dequantize(weight)
    for o in range(OUT):
        for i in range(IN):
            if weight.table is None:
                value = float(weight.codes[o, i])
            else:
                value = float(weight.table[int(weight.codes[o, i // 2]) >> 4 * (i % 2) & 15])
            expected = value * float(weight.scales[o, i // GROUP])
            if weight.offsets is not None:
                expected += float(weight.offsets[o, i // GROUP])
            place = i if weight.input_order is None else int(weight.input_order[i])
            assert float(numbers[o, place]) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_a_dry_weight_has_a_shape_and_bytes() -> None:
    with torch.device("meta"):
        weight = QuantizedWeight(torch.empty(8, 32, dtype=torch.uint8), torch.empty(8, 2), torch.empty(16))
    assert weight.shape == (8, 64)
    assert weight.group_size == 32
    assert weight.nbytes == 8 * 32 + 8 * 2 * 4 + 16 * 4
    assert dequantize(weight, torch.bfloat16).shape == (8, 64)


def test_some_outputs_of_a_weight_are_views() -> None:
    weight = random_weight("table", OUT, IN, GROUP, has_offsets=True, is_permuted=True)
    part = weight.rows(slice(1, 3))
    assert torch.equal(dequantize(part), dequantize(weight)[1:3])
    assert part.codes.data_ptr() == weight.codes[1:].data_ptr()


@pytest.mark.parametrize("kind", ["int8", "table", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize(("has_offsets", "is_permuted"), [(False, False), (True, True)])
def test_a_layer_is_that_of_the_dequantized_weight(
    ops: Backend, kind: str, has_offsets: bool, is_permuted: bool
) -> None:
    weight = random_weight(kind, 70, 96, 32, has_offsets=has_offsets, is_permuted=is_permuted)
    x, bias = torch.randn(5, 96), torch.randn(70)
    expected = x @ dequantize(weight).T + bias
    torch.testing.assert_close(ops.linear(x, ops.pack_linear(weight, bias)), expected, atol=1e-4, rtol=1e-4)
    gated = ops.gated_linear(x, ops.pack_gated_linear(weight, bias))
    torch.testing.assert_close(gated, ops.activate_and_mul(expected.clone()), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["int8", "table", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("is_permuted", [False, True])
def test_rows_of_a_packed_weight_are_those_of_the_dequantized_one(
    ops: Backend, kind: str, is_permuted: bool, dtype: torch.dtype
) -> None:
    weight = random_weight(kind, 70, 90, 15 if kind != "table" else 18, is_permuted=is_permuted)
    packed, index = ops.pack_linear(weight, torch.randn(70)), torch.tensor([69, 0, 33, 0, 16])
    assert ops.has_rows(packed)
    expected = dequantize(weight, dtype)[index]
    assert torch.equal(ops.take_packed_rows(packed, index, dtype), expected)
    assert torch.equal(ops.take_packed_rows(packed, index, dtype, 5.75), expected * 5.75)


@pytest.mark.parametrize("scales", [torch.float16, torch.bfloat16])
def test_rows_of_a_packed_weight_have_offsets(ops: Backend, scales: torch.dtype) -> None:
    weight = random_weight("table", 70, 96, 32, has_offsets=True)
    assert weight.offsets is not None
    weight = weight._replace(scales=weight.scales.to(scales), offsets=weight.offsets.to(scales))
    got = ops.take_packed_rows(ops.pack_linear(weight), torch.arange(70), torch.float32)
    torch.testing.assert_close(got, dequantize(weight), atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_a_plain_weight_that_is_packed(ops: Backend, dtype: torch.dtype) -> None:
    weight, index = torch.randn(70, 45).to(dtype), torch.tensor([69, 0, 33, 0, 16])
    packed = ops.pack_linear(weight)
    if ops.has_rows(packed):
        assert torch.equal(ops.take_packed_rows(packed, index, dtype), weight[index])
        assert torch.equal(ops.take_packed_rows(packed, index, dtype, 0.3), weight[index] * 0.3)
    else:
        assert dtype != torch.bfloat16


def test_rows_that_there_are_not_are_refused(ops: Backend) -> None:
    packed = ops.pack_linear(random_weight("int8", 70, 96, 32))
    with pytest.raises(IndexError):
        ops.take_packed_rows(packed, torch.tensor([0, 70]), torch.float32)


@pytest.mark.parametrize(
    ("scales", "offsets", "message"),
    [
        ((70, 40), None, "1264 inputs are no 40 groups of one size"),
        ((70, 0), None, "1264 inputs are no 0 groups"),
        ((69, 79), None, r"a weight \[70, 1264\] has scales \[69, 79\], not \[70, 79\]"),
        ((70, 79), (70, 1), r"has offsets \[70, 1\], not \[70, 79\]"),
    ],
)
def test_a_weight_with_too_few_scales_is_not_packed(
    ops: Backend, scales: tuple[int, int], offsets: tuple[int, int] | None, message: str
) -> None:
    weight = random_weight("int8", 70, 1264, 16)
    weight = weight._replace(scales=torch.ones(scales), offsets=None if offsets is None else torch.ones(offsets))
    for pack in (ops.pack_linear, ops.pack_gated_linear):
        with pytest.raises(ValueError, match=message):
            pack(weight)
    with pytest.raises(ValueError, match=message):
        ops.pack_experts([ExpertWeights(weight, weight)], 1)
