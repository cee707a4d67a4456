"""Norms of rows equal those of plain torch."""

from typing import Any

import pytest
import torch
from torch import Tensor

from quire.ops.eager.backend import EagerBackend
from quire.ops.eager.linear import PlainLinear
from quire.ops.triton import norms
from quire.ops.triton.backend import TritonBackend
from tests.ops.triton.conftest import DEVICE

EAGER, TRITON = EagerBackend(PlainLinear()), TritonBackend()
TYPES = [torch.bfloat16, torch.float16, torch.float32]


def rows(*shape: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(*shape) * 2).to(dtype).to(DEVICE)


def weights(*shape: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(*shape) * 0.3 + 1).to(dtype).to(DEVICE)


def assert_rounded_alike(actual: Tensor, expected: Tensor) -> None:
    """Equal but for few numbers, which lie beside each other: sums of float32 in another order."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    if actual.dtype == torch.float32:
        torch.testing.assert_close(actual, expected, rtol=2e-6, atol=1e-6)
        return
    torch.testing.assert_close(actual, expected, rtol=2 * torch.finfo(actual.dtype).eps, atol=0)
    assert (actual != expected).float().mean() < 0.02


def taken(result: Any) -> Any:
    """The result of a kernel, and not of the plain torch that the backend falls back to."""
    assert result is not None, "the kernel did not take the tensors"
    return result


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("shape", [(3, 64), (1, 40), (5, 520), (2, 3, 128), (33, 16), (2, 5000)])
def test_rms_norm(shape: tuple[int, ...], wide: bool, dtype: torch.dtype) -> None:
    x, weight = rows(*shape, dtype=dtype), weights(shape[-1], dtype=torch.float32 if wide else dtype)
    assert_rounded_alike(taken(norms.rms_norm(x, weight, 1e-6)), EAGER.rms_norm(x, weight, 1e-6))


def test_longest_rows() -> None:
    x, weight = rows(1, norms.LONGEST, dtype=torch.bfloat16), weights(norms.LONGEST, dtype=torch.bfloat16)
    assert_rounded_alike(taken(norms.rms_norm(x, weight, 1e-6)), EAGER.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("head_dim", [128, 40, 264])
def test_a_weight_for_each_head_and_rows_that_lie_apart(head_dim: int) -> None:
    heads = rows(7, 9, head_dim, dtype=torch.bfloat16)[:, :5]
    weight = weights(5, head_dim, dtype=torch.bfloat16)
    assert_rounded_alike(taken(norms.rms_norm(heads, weight, 1e-5)), EAGER.rms_norm(heads, weight, 1e-5))
    one = weights(head_dim, dtype=torch.bfloat16)
    assert_rounded_alike(
        taken(norms.layer_norm(heads, weight, None, 1e-5)), EAGER.layer_norm(heads, weight, None, 1e-5)
    )
    assert_rounded_alike(taken(norms.rms_norm(heads, one, 1e-5)), EAGER.rms_norm(heads, one, 1e-5))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(3, 72), (4, 1000), (1, 2056)])
def test_add_rms_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual, weight = rows(*shape, dtype=dtype), rows(*shape, dtype=dtype), weights(shape[-1], dtype=dtype)
    expected, total = EAGER.add_rms_norm(x, residual.clone(), weight, 1e-6)
    actual = taken(norms.add_rms_norm(x, residual, weight, 1e-6))
    assert torch.equal(residual, total)
    assert_rounded_alike(actual, expected)


def test_add_rms_norm_of_columns() -> None:
    wide = rows(3, 200, dtype=torch.bfloat16)
    x, residual, weight = wide[:, :64], wide[:, 64:128], weights(64, dtype=torch.float32)
    expected, total = EAGER.add_rms_norm(x, residual.clone(), weight, 1e-6)
    rest = wide[:, 128:].clone()
    actual = taken(norms.add_rms_norm(x, residual, weight, 1e-6))
    assert torch.equal(residual, total)
    assert torch.equal(wide[:, 128:], rest)
    assert_rounded_alike(actual, expected)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("given", ["weight", "weight and bias", "neither"])
@pytest.mark.parametrize("shape", [(3, 96), (2, 3, 72), (2, 2056)])
def test_layer_norm(shape: tuple[int, ...], given: str, dtype: torch.dtype) -> None:
    x = rows(*shape, dtype=dtype) + 3
    weight = weights(shape[-1], dtype=dtype) if "weight" in given else None
    bias = weights(shape[-1], dtype=dtype) if "bias" in given else None
    expected = EAGER.layer_norm(x, weight, bias, 1e-5)
    assert_rounded_alike(taken(norms.layer_norm(x, weight, bias, 1e-5)), expected)


def test_a_row_is_the_same_in_any_company() -> None:
    x, weight = rows(129, 128, dtype=torch.bfloat16), weights(128, dtype=torch.bfloat16)
    together = norms.rms_norm(x, weight, 1e-6)
    assert torch.equal(
        torch.cat([norms.rms_norm(x[i : i + 1], weight, 1e-6) for i in (0, 77, 128)]), together[[0, 77, 128]]
    )


def test_nothing_to_normalize() -> None:
    none, weight = rows(0, 64, dtype=torch.float32), weights(64, dtype=torch.float32)
    assert TRITON.rms_norm(none, weight, 1e-6).shape == (0, 64)


@pytest.mark.parametrize("size", [37, norms.LONGEST + 8])
def test_rows_that_torch_takes(size: int) -> None:
    """What a kernel does not take falls through, and the result is right."""
    x, weight = rows(2, size, dtype=torch.float32), weights(size, dtype=torch.float32)
    assert torch.equal(TRITON.rms_norm(x, weight, 1e-6), EAGER.rms_norm(x, weight, 1e-6))
    assert torch.equal(TRITON.layer_norm(x, weight, None, 1e-6), EAGER.layer_norm(x, weight, None, 1e-6))
    actual, sums = TRITON.add_rms_norm(x, x.clone(), weight, 1e-6)
    assert torch.equal(sums, x * 2)
    assert torch.equal(actual, EAGER.rms_norm(sums, weight, 1e-6))
