"""Operations on elements and rows equal those of plain torch."""

from typing import get_args

import pytest
import torch
from torch import Tensor

from quire.ops.activations import Activation, PlainActivation
from quire.ops.eager.backend import EagerBackend
from quire.ops.eager.linear import PlainLinear
from quire.ops.triton import elementwise
from quire.ops.triton.backend import TritonBackend
from tests.ops.triton.conftest import DEVICE

EAGER, TRITON = EagerBackend(PlainLinear()), TritonBackend()
TYPES = [torch.bfloat16, torch.float16, torch.float32]


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(*shape) * 3).to(dtype).to(DEVICE)


def assert_rounded_once(actual: Tensor | None, exact: Tensor, dtype: torch.dtype, atol: float = 1e-6) -> None:
    """`exact` is float32, computed from the same inputs; `atol` is for what cancels there as well."""
    assert actual is not None, "the kernel did not take the tensors"
    assert actual.dtype == dtype
    rtol = 3e-6 if dtype == torch.float32 else torch.finfo(dtype).eps * 0.51
    torch.testing.assert_close(actual.float(), exact, rtol=rtol, atol=atol, equal_nan=True)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("activation", get_args(PlainActivation))
def test_activate(activation: PlainActivation, dtype: torch.dtype) -> None:
    for shape in ((3, 40), (2, 520)):
        x = random(*shape, dtype=dtype)
        x[0, :4] = torch.tensor([torch.nan, torch.inf, -80.0, 0.0])
        exact = EAGER.activate(x.double(), activation).float()  # torch's gelu of inf is NaN in float32 with AVX-512
        assert_rounded_once(elementwise.activate(x, activation), exact, dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("activation", [*get_args(get_args(Activation)[0]), *get_args(get_args(Activation)[1])])
def test_activate_and_mul(activation: Activation, dtype: torch.dtype) -> None:
    for size, num_rows in ((24, 3), (40, 2), (1096, 2)):
        x = random(num_rows, 2 * size + 8, dtype=dtype)[:, : 2 * size].clamp(-6, 6) * 5
        x[0, :2] = torch.tensor([torch.nan, 20.0])
        exact = EAGER.activate_and_mul(x.float(), activation)
        wide = torch.cat([x, x], 1)[:, : 2 * size]
        for each in (x, wide):
            assert_rounded_once(elementwise.activate_and_mul(each, activation), exact, dtype, atol=2e-5)


@pytest.mark.parametrize("dtype", TYPES)
def test_softcap(dtype: torch.dtype) -> None:
    for numbers in (
        random(3, 40) * 20,
        random(2, 600) * 1e-3,
        torch.tensor([torch.nan, torch.inf, -torch.inf, *range(5)]),
    ):
        x = numbers.to(dtype).to(DEVICE)
        exact = ((x.double() * 0.5 / 30).tanh() * 30).float()
        assert elementwise.scale(x, 0.5, 30.0)
        assert_rounded_once(x, exact, dtype)


def test_scale_without_a_cap() -> None:
    x = random(3, 5)
    assert torch.equal(TRITON.scale(x.clone(), 0.5), x * 0.5)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [64, 40, 1496])
def test_take_rows(size: int, dtype: torch.dtype) -> None:
    x, index = random(11, size + 8, dtype=dtype)[:, :size], torch.tensor([10, 0, 3, 3], device=DEVICE)
    taken = elementwise.take_rows(x, index, 1.7)
    assert taken is not None
    assert torch.equal(taken, EAGER.take_rows(x, index, 1.7))
    assert torch.equal(TRITON.take_rows(x, index), x[index])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("half", [8, 24, 64, 136])
def test_rotation(half: int, dtype: torch.dtype) -> None:
    positions = torch.tensor([0, 1, 5, 4097, 131071], device=DEVICE)
    frequencies = (10000.0 ** -(torch.arange(half) / half)).to(DEVICE)
    tables = elementwise.rotation(positions, frequencies, 1.3, dtype)
    assert tables is not None
    for actual, expected in zip(tables, EAGER.rotation(positions, frequencies, 1.3, dtype), strict=True):
        torch.testing.assert_close(actual, expected, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("rotated", "size"), [(64, 64), (32, 80), (16, 256), (48, 56), (128, 128)])
def test_rotary(rotated: int, size: int, dtype: torch.dtype) -> None:
    x, positions = random(5, 9, size, dtype=dtype)[:, 2:7], torch.arange(5, device=DEVICE) * 3
    frequencies = torch.rand(rotated // 2).to(DEVICE)
    cos, sin = EAGER.rotation(positions, frequencies, 1.0, dtype)
    exact = EAGER.rotary(x.float(), cos.float(), sin.float())
    assert_rounded_once(elementwise.rotary(x, cos, sin), exact, dtype)


def test_no_rows() -> None:
    assert TRITON.activate_and_mul(random(0, 64)).shape == (0, 32)
    assert TRITON.rotary(random(0, 2, 16), random(0, 1, 16), random(0, 1, 16)).shape == (0, 2, 16)
    assert TRITON.rotation(torch.empty(0).long(), random(8), 1.0, torch.float32)[0].shape == (0, 1, 16)


def test_tensors_that_torch_takes() -> None:
    """What a kernel does not take falls through, and the result is right."""
    x = random(4, 8).T
    assert torch.equal(TRITON.activate(x, "silu"), EAGER.activate(x, "silu"))
    assert torch.equal(TRITON.scale(x.clone(), 2.0, 5.0), EAGER.scale(x.clone(), 2.0, 5.0))
    double = random(3, 8).double()
    assert torch.equal(TRITON.activate_and_mul(double), EAGER.activate_and_mul(double))
    whole = torch.arange(12, device=DEVICE).view(4, 3)
    assert torch.equal(TRITON.take_rows(whole, torch.tensor([3, 1], device=DEVICE)), whole[[3, 1]])
