"""Linear layers with quantized weights: the products of dense layers that have the same numbers."""

import pytest
import torch
from torch import Tensor

from quire.ops.quantized import QuantizedWeight, dequantize
from quire.ops.stored import take_apart
from quire.ops.triton.backend import TritonBackend
from quire.ops.triton.linear import MAX_TOKENS
from quire.ops.triton.quantized import CodedLayer, dequantized
from tests.ops.test_quantized import random_weight
from tests.ops.triton.conftest import DEVICE

INT4 = torch.arange(-8.0, 8.0)
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
TABLES = {"table": None, "line": INT4, "complement": INT4.roll(8), "unsigned": INT4 + 8, "float4_e2m1": E2M1}
KINDS = {
    **dict.fromkeys(("int8", "float8_e4m3fn", "float8_e5m2", "table", "float4_e2m1")),
    **dict.fromkeys(("line", "complement", "unsigned"), "line"),
}
"""What a test names a weight, and what the kernel does, if it has another name."""


@pytest.fixture
def ops() -> TritonBackend:
    return TritonBackend()


def weight_of(kind: str, out: int, size: int, group: int, *, is_rich: bool = False) -> QuantizedWeight:
    """A `rich` weight has offsets, and inputs in another order."""
    weight = random_weight(
        "table" if kind in TABLES else kind, out, size, group, has_offsets=is_rich, is_permuted=is_rich
    )
    table = TABLES.get(kind)
    weight = weight if table is None else weight._replace(table=table)
    return weight._replace(**{k: v.to(DEVICE) for k, v in weight._asdict().items() if isinstance(v, Tensor)})


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def rounded_once(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """The numbers in the order of the codes, where a device rounds the sum of a product and an offset to float32 once.

    `dequantize` rounds the product as well. In float64 the product is exact.
    """
    scales, (rows, num_groups) = weight.scales.double(), weight.scales.shape
    values = dequantize(weight._replace(scales=torch.ones_like(weight.scales), offsets=None, input_order=None))
    numbers = values.double().view(rows, num_groups, -1) * scales[..., None]
    if weight.offsets is not None:
        numbers += weight.offsets.double()[..., None]
    return numbers.float().view(weight.shape).to(dtype)


@pytest.mark.parametrize("is_rich", [False, True], ids=["scales", "offsets and order"])
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_codes(ops: TritonBackend, kind: str, is_rich: bool) -> None:
    weight = weight_of(kind, 37, 160, 32, is_rich=is_rich)
    layer = ops.pack_linear(weight)
    assert isinstance(layer, CodedLayer)
    assert layer.codes.kind == (KINDS[kind] or kind)
    found = dequantized(weight, layer.codes, torch.float16)
    twice = dequantize(weight._replace(input_order=None), torch.float16)
    assert ((found == twice) | (found == rounded_once(weight, torch.float16))).all()


@pytest.mark.parametrize(("size", "group"), [(160, 16), (96, 32), (192, 64), (384, 128), (256, 256), (96, 96)])
@pytest.mark.parametrize("kind", ["int8", "line"])
def test_products(ops: TritonBackend, kind: str, size: int, group: int) -> None:
    """A dense layer of the same numbers has the same bits: its inputs are not split either."""
    weight, bias = weight_of(kind, 70, size, group, is_rich=True), numbers(70)
    layer, dense = (
        ops.pack_linear(weight, bias),
        ops.pack_linear(dequantize(weight._replace(input_order=None)).bfloat16(), bias),
    )
    assert isinstance(layer, CodedLayer)
    assert weight.input_order is not None
    x = numbers(17, size)
    for part in (x[:1], x):
        assert torch.equal(ops.linear(part, layer), ops.linear(part[:, weight.input_order], dense))


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "line", "table"])
def test_a_row_has_the_same_bits_in_any_company(ops: TritonBackend, kind: str) -> None:
    layer, x = ops.pack_linear(weight_of(kind, 5, 1152, 64, is_rich=True)), numbers(MAX_TOKENS, 1152)
    together = ops.linear(x, layer)
    for first, end in ((0, 1), (100, 116), (3, 20), (60, 124)):
        assert torch.equal(ops.linear(x[first:end], layer), together[first:end]), (first, end)


@pytest.mark.parametrize("group", [32, 128])
def test_scales_may_lie_apart_and_have_two_bytes(ops: TritonBackend, group: int) -> None:
    weight, x = weight_of("line", 6, 256, group), numbers(3, 256)
    scales = weight.scales.half()
    apart = scales.repeat_interleave(2, 1)[:, ::2]
    assert not apart.is_contiguous()
    expected = ops.linear(x, ops.pack_linear(dequantize(weight._replace(scales=scales), x.dtype)))
    assert torch.equal(ops.linear(x, ops.pack_linear(weight._replace(scales=apart))), expected)


@pytest.mark.parametrize("kind", ["int8", "float4_e2m1"])
def test_gated_layers(ops: TritonBackend, kind: str) -> None:
    weight, bias = weight_of(kind, 70, 1152, 32), numbers(70)
    layer, x = ops.pack_gated_linear(weight, bias), numbers(3, 1152)
    rounded = ops.linear(x, ops.pack_linear(weight, bias))
    for activation in ("silu", "relu"):
        expected = ops.activate_and_mul(rounded.float(), activation)
        found = ops.gated_linear(x, layer, activation)
        torch.testing.assert_close(found.float(), expected, atol=1e-5, rtol=2**-7)


@pytest.mark.parametrize("num_tokens", [MAX_TOKENS + 1, 0])
def test_products_of_many_tokens_are_those_of_dequantized_weights(ops: TritonBackend, num_tokens: int) -> None:
    weight, bias = weight_of("line", 6, 64, 32, is_rich=True), numbers(6)
    x = numbers(num_tokens, 64)
    expected = torch.nn.functional.linear(x, dequantize(weight, x.dtype), bias)
    torch.testing.assert_close(ops.linear(x, ops.pack_linear(weight, bias)), expected)
    assert ops.gated_linear(x, ops.pack_gated_linear(weight, bias)).shape == (num_tokens, 3)


@pytest.mark.parametrize(("size", "group"), [(96, 48), (40, 8), (1536, 192)])
def test_unusual_groups_are_dequantized(ops: TritonBackend, size: int, group: int) -> None:
    weight, x = weight_of("int8", 6, size, group), numbers(3, size)
    layer = ops.pack_linear(weight)
    assert not isinstance(layer, CodedLayer)
    expected = x.float() @ dequantize(weight, x.dtype).float().T
    torch.testing.assert_close(ops.linear(x, layer).float(), expected, atol=1e-2, rtol=2**-8)


def test_float32_is_dequantized(ops: TritonBackend) -> None:
    weight, x = weight_of("line", 6, 64, 32), torch.randn(3, 64, device=DEVICE)
    torch.testing.assert_close(ops.linear(x, ops.pack_linear(weight)), x @ dequantize(weight).T)


def test_a_layer_is_stored_and_its_rows_are_found(ops: TritonBackend) -> None:
    layer = ops.pack_linear(weight_of("complement", 6, 64, 32))
    restored, x = ops.restore(take_apart(layer)), numbers(3, 64)
    assert torch.equal(ops.linear(x, restored), ops.linear(x, layer))
    assert ops.has_rows(restored)
    index = torch.tensor([4, 1], device=DEVICE)
    expected = dequantize(layer.weight, torch.bfloat16)[index]
    assert torch.equal(ops.take_packed_rows(restored, index, torch.bfloat16), expected)


def test_a_dry_weight_is_packed(ops: TritonBackend) -> None:
    with torch.device("meta"):
        weight = QuantizedWeight(torch.empty(8, 32, dtype=torch.uint8), torch.empty(8, 2), torch.empty(16))
    assert ops.pack_linear(weight).weight is not None


def test_invariant_products_of_many_tokens_are_those_of_few() -> None:
    ops, weight = TritonBackend(is_invariant=True), weight_of("line", 6, 64, 32)
    x = numbers(MAX_TOKENS + 3, 64)
    packed, gated = ops.pack_linear(weight), ops.pack_gated_linear(weight)
    assert isinstance(packed, CodedLayer)
    for run in (lambda part: ops.linear(part, packed), lambda part: ops.gated_linear(part, gated)):
        together = run(x)
        assert len(together) == len(x)
        assert torch.equal(run(x[:MAX_TOKENS]), together[:MAX_TOKENS])
        assert torch.equal(run(x[MAX_TOKENS:]), together[MAX_TOKENS:])
