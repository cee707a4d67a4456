"""Linear layers with packed weights against the plain product, and their independence of the batch."""

from typing import get_args

import pytest
import torch

from quire.ops.activations import Activation, PlainActivation
from quire.ops.backend import Backend
from quire.ops.cpu.native import NativeBackend

torch.set_num_threads(1)

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 1), (7, 33), (130, 64), (257, 511)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear(ops: Backend, out_features: int, in_features: int, has_bias: bool, dtype: torch.dtype) -> None:
    weight = (torch.randn(out_features, in_features) / in_features**0.5).to(dtype)
    bias = torch.randn(out_features).to(dtype) if has_bias else None
    packed = ops.pack_linear(weight, bias)
    for num_tokens in (1, 3, 32, 65):
        x = torch.randn(num_tokens, in_features).to(dtype)
        expected = x.double() @ weight.double().T + (bias.double() if bias is not None else 0)
        got = ops.linear(x, packed)
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("activation", [*get_args(PlainActivation), "clamped_swiglu"])
def test_a_gated_layer_is_activation_and_product_of_the_plain_one(
    ops: Backend, activation: Activation, has_bias: bool, dtype: torch.dtype
) -> None:
    weight = (torch.randn(2 * 75, 64) / 8).to(dtype)
    bias = torch.randn(2 * 75).to(dtype) if has_bias else None
    x = torch.randn(33, 64).to(dtype)
    got = ops.gated_linear(x, ops.pack_gated_linear(weight, bias), activation)
    assert torch.equal(got, ops.activate_and_mul(ops.linear(x, ops.pack_linear(weight, bias)), activation))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("activation", get_args(PlainActivation))
def test_an_activated_layer_is_activation_of_the_plain_one(
    ops: Backend, activation: PlainActivation, has_bias: bool, dtype: torch.dtype
) -> None:
    packed = ops.pack_linear((torch.randn(75, 64) / 4).to(dtype), torch.randn(75).to(dtype) if has_bias else None)
    for num_tokens in (1, 33):
        x = torch.randn(num_tokens, 64).to(dtype)
        got = ops.linear(x, packed, activation)
        assert torch.equal(got, ops.activate(ops.linear(x, packed), activation))


def test_input_may_be_a_view(ops: Backend) -> None:
    weight = torch.randn(5, 8)
    x = torch.randn(4, 16)[:, 8:]
    torch.testing.assert_close(ops.linear(x, ops.pack_linear(weight)), x @ weight.T, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_its_neighbours(native: NativeBackend, dtype: torch.dtype) -> None:
    packed = native.pack_linear(torch.randn(192, 128).to(dtype), torch.randn(192).to(dtype))
    x = torch.randn(40, 128).to(dtype)
    together = native.linear(x, packed)
    for row in (0, 17, 39):
        alone = native.linear(x[row : row + 1], packed)
        torch.testing.assert_close(alone[0], together[row], atol=1e-5, rtol=2 * torch.finfo(dtype).eps)
