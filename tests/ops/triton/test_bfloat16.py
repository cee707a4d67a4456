"""bfloat16 in the interpreter equals torch's: kernels are tested in the dtype that they serve."""

import pytest
import torch
import triton.language as tl

from quire.ops.triton.launch import Kernel
from tests.ops.triton.conftest import DEVICE

interpreted = pytest.mark.skipif(DEVICE != "cpu", reason="a device has bfloat16 of its own")


@Kernel
def _combine(x_ptr, y_ptr, out_ptr, size, OPERATION: tl.constexpr):
    at = tl.arange(0, 64)
    x, y = tl.load(x_ptr + at, mask=at < size), tl.load(y_ptr + at, mask=at < size)
    if OPERATION == "add":
        out = x + y
    elif OPERATION == "sub":
        out = x - y
    elif OPERATION == "mul":
        out = x * y
    elif OPERATION == "neg":
        out = -x
    elif OPERATION == "max":
        out = tl.maximum(x, y)
    elif OPERATION == "where":
        out = tl.where(x < y, x, y)
    elif OPERATION == "round":
        out = (x.to(tl.float32) * y.to(tl.float32) / 3).to(tl.bfloat16)
    elif OPERATION == "double":
        out = (x.to(tl.float64) * y.to(tl.float64)).to(tl.bfloat16)
    elif OPERATION == "whole":
        out = (x.to(tl.int32) + at).to(tl.bfloat16)
    tl.store(out_ptr + at, out, mask=at < size)


@Kernel
def _multiply(x_ptr, y_ptr, out_ptr):
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(out_ptr + at, tl.dot(tl.load(x_ptr + at), tl.load(y_ptr + at)))


@Kernel
def _reduce(x_ptr, sums_ptr, running_ptr, most_ptr):
    columns = tl.arange(0, 64)
    x = tl.load(x_ptr + columns)
    tl.store(sums_ptr, tl.sum(x, axis=0))
    tl.store(most_ptr, tl.max(x, axis=0))
    tl.store(running_ptr + columns, tl.cumsum(x, axis=0))


EXPECTED = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "neg": lambda x, y: -x,
    "max": torch.maximum,
    "where": torch.minimum,
    "round": lambda x, y: (x.float() * y.float() / 3).bfloat16(),
    "double": lambda x, y: (x.double() * y.double()).bfloat16(),
    "whole": lambda x, y: (x.int() + torch.arange(len(x))).bfloat16(),
}


@interpreted
@pytest.mark.parametrize("operation", EXPECTED)
def test_elementwise(operation: str) -> None:
    x, y = (torch.randn(2, 61) * 100).bfloat16()
    out = torch.empty_like(x)
    _combine((1,), x, y, out, len(x), OPERATION=operation)
    assert torch.equal(out, EXPECTED[operation](x, y))


@interpreted
def test_unusual_numbers() -> None:
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e-40, -0.0]).bfloat16()
    out = torch.empty_like(x)
    _combine((1,), x, x, out, len(x), OPERATION="add")
    assert torch.equal(out.nan_to_num(7.0), (x + x).nan_to_num(7.0))


@interpreted
def test_products_accumulate_in_float32() -> None:
    x, y = torch.randn(2, 16, 16).bfloat16()
    out = torch.empty(16, 16)
    _multiply((1,), x, y, out)
    torch.testing.assert_close(out, x.float() @ y.float(), rtol=1e-5, atol=1e-5)


@interpreted
def test_reductions() -> None:
    x = torch.randn(64).bfloat16()
    total, running, most = torch.empty(1).bfloat16(), torch.empty_like(x), torch.empty(1).bfloat16()
    _reduce((1,), x, total, running, most)
    torch.testing.assert_close(total, x.sum(0, keepdim=True))
    torch.testing.assert_close(running, x.float().cumsum(0).bfloat16())
    assert torch.equal(most, x.max().reshape(1))
