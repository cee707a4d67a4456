"""Linear layers with weights of one byte each: against the product with dequantized weights, in any batch."""

import pytest
import torch
from torch import Tensor

from quire.ops.backend import Backend
from quire.ops.cpu.native import NativeBackend
from quire.ops.cpu.quantized_panels import QuantizedPanelWeight
from quire.ops.quantized import QuantizedWeight

torch.set_num_threads(1)

ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""What a result may differ by, relative to the largest: half a digit of the activations' type, and as much again."""

SHAPES = [(1, 1), (7, 33), (33, 7), (64, 64), (130, 65), (257, 511), (96, 1100)]


def layer(out_features: int, in_features: int) -> QuantizedWeight:
    values = torch.randint(-127, 128, (out_features, in_features), dtype=torch.int8)
    return QuantizedWeight(values, (torch.rand(out_features, 1) + 0.5) / 100)


def dequantized(weight: QuantizedWeight) -> Tensor:
    return weight.codes.double() * weight.scales.double()


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_result_is_that_of_dequantized_weights(
    ops: Backend, shape: tuple[int, int], has_bias: bool, dtype: torch.dtype
) -> None:
    weight = layer(*shape)
    bias = torch.randn(shape[0]).to(dtype) if has_bias else None
    packed = ops.pack_linear(weight, bias)
    for num_tokens in (1, 2, 3, 5, 12, 13, 33, 110, 200):
        x = torch.randn(num_tokens, shape[1]).to(dtype)
        expected = x.double() @ dequantized(weight).T + (bias.double() if bias is not None else 0)
        got = ops.linear(x, packed)
        assert got.dtype == dtype
        largest = expected.abs().max().item() + 1e-3
        torch.testing.assert_close(got.double(), expected, atol=2 * ROUNDING[dtype] * largest, rtol=0)


@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_kernels_round_little_but_the_result(native: NativeBackend, dtype: torch.dtype) -> None:
    weight, bias, x = layer(130, 511), torch.randn(130).to(dtype), torch.randn(40, 511).to(dtype)
    expected = x.double() @ dequantized(weight).T + bias.double()
    got = native.linear(x, native.pack_linear(weight, bias))
    slack = 2e-5 * expected.abs().max().item()  # of sums in float32, and of activations as integers
    torch.testing.assert_close(got.double(), expected, rtol=ROUNDING[dtype], atol=slack)


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("shape", [(130, 65), (300, 1030), (40, 12000)], ids=str)
def test_a_row_is_the_same_in_any_batch(native: NativeBackend, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """To the bit, whatever becomes of the batch: groups of panels, tiles of all sizes, several blocks."""
    packed = native.pack_linear(layer(*shape), torch.randn(shape[0]).to(dtype))
    x = torch.randn(230, shape[1]).to(dtype)
    together = native.linear(x, packed)
    for num_tokens in (*range(1, 27), 95, 96, 97, 120):
        assert torch.equal(native.linear(x[:num_tokens], packed), together[:num_tokens]), num_tokens
    assert torch.equal(native.linear(x[77:78], packed), together[77:78])


def test_the_number_of_threads_does_not_show(native: NativeBackend) -> None:
    packed, x = native.pack_linear(layer(1000, 300)), torch.randn(70, 300)
    one = [native.linear(x[:rows], packed) for rows in (1, 2, 70)]
    torch.set_num_threads(4)
    try:
        for expected in one:
            assert torch.equal(native.linear(x[: len(expected)], packed), expected)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_a_gated_layer_is_the_plain_one_activated(ops: Backend, activation: str, dtype: torch.dtype) -> None:
    weight, bias, x = layer(2 * 75, 64), torch.randn(2 * 75).to(dtype), torch.randn(33, 64).to(dtype)
    got = ops.gated_linear(x, ops.pack_gated_linear(weight, bias), activation)
    expected = ops.activate_and_mul(ops.linear(x, ops.pack_linear(weight, bias)), activation)
    # Equal, unless a processor that cannot convert float16 computes all of it in float32.
    slack = 0 if dtype != torch.float16 else 8 * ROUNDING[dtype]
    torch.testing.assert_close(got, expected, rtol=slack, atol=slack)


def test_input_may_be_a_view(ops: Backend) -> None:
    weight, x = layer(5, 8), torch.randn(4, 16)
    packed = ops.pack_linear(weight)
    for part in (x[:, 8:], torch.randn(8, 4).T):
        expected = (part.double() @ dequantized(weight).T).float()
        torch.testing.assert_close(ops.linear(part, packed), expected, atol=1e-5, rtol=1e-5)


def test_an_output_without_a_number_is_none(ops: Backend) -> None:
    """A checkpoint's NaN must show, and in its own output alone."""
    weight = layer(40, 64)
    weight.scales[3] = torch.nan
    out = ops.linear(torch.randn(2, 64), ops.pack_linear(weight))
    assert out.isnan().nonzero()[:, 1].tolist() == [3, 3]


def test_packed_weights_take_a_byte_a_number(native: NativeBackend) -> None:
    packed = native.pack_linear(layer(100, 64))
    assert isinstance(packed, QuantizedPanelWeight)
    assert 100 * 64 <= packed.panels.untyped_storage().nbytes() <= 128 * (64 + 4)


def test_other_inputs_are_refused(native: NativeBackend) -> None:
    packed = native.pack_linear(layer(8, 16), torch.randn(8))
    with pytest.raises(ValueError, match=r"\[2, 15\]; this layer takes floats \[\*, 16\]"):
        native.linear(torch.randn(2, 15), packed)
    with pytest.raises(ValueError, match="float64"):
        native.linear(torch.randn(2, 16, dtype=torch.float64), packed)
    with pytest.raises(ValueError, match=r"bfloat16, and the layer's bias torch\.float32"):
        native.linear(torch.randn(2, 16, dtype=torch.bfloat16), packed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_recording_runs_on_new_inputs(own_native: NativeBackend, dtype: torch.dtype) -> None:
    packed, x = own_native.pack_linear(layer(300, 64)), torch.randn(3, 64).to(dtype)
    out, recording = own_native.record(lambda: own_native.linear(x, packed))
    assert recording is not None
    x.copy_(torch.randn(3, 64))
    recording.run()
    assert torch.equal(out, own_native.linear(x, packed))
