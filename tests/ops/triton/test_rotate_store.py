"""Norms, rotation and the KV cache in one kernel, against plain torch."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.ops.backend import NewHeads
from quire.ops.cache_pages import ScalePlanes, planes
from quire.ops.cache_rows import LARGEST_CODE, in_octets
from quire.ops.eager.backend import EagerBackend
from quire.ops.eager.linear import PlainLinear
from quire.ops.triton.backend import TritonBackend
from tests.ops.triton.conftest import DEVICE

EAGER, TRITON = EagerBackend(PlainLinear(), pages=ScalePlanes()), TritonBackend()
NUM_TOKENS, NUM_PAGES, POISON = 3, 4, 0x46


def empty_cache(num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype, gap: int = 0) -> Tensor:
    """Pages of a byte that is nowhere written; between pages lie `gap` numbers."""
    page = EAGER.kv_cache_shape(1, block_size, num_kv_heads, head_dim, dtype)[1:]
    memory = torch.full((NUM_PAGES, (math.prod(page) + gap) * dtype.itemsize), POISON, dtype=torch.uint8, device=DEVICE)
    return memory.view(dtype)[:, : math.prod(page)].unflatten(1, page)


def caches(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
    return empty_cache(*arguments, **options), empty_cache(*arguments, **options)


def inputs(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    random = torch.Generator().manual_seed(head_dim)
    return torch.randn(NUM_TOKENS, num_heads + 2 * num_kv_heads, head_dim, generator=random).to(DEVICE, dtype)


def assert_same_cache(got: Tensor, expected: Tensor) -> None:
    """Scales and plain rows are equal up to rounding, and codes up to one."""
    if expected.dtype not in LARGEST_CODE:
        torch.testing.assert_close(got, expected, rtol=2e-6, atol=1e-6, equal_nan=True)
        return
    (a, b), (c, d) = (planes(in_octets(x)) for x in (got, expected))
    torch.testing.assert_close(b.contiguous().view(torch.float32), d.contiguous().view(torch.float32))
    assert (a != c).float().mean() < 0.01  # a value at the middle of two codes
    if expected.dtype == torch.uint8:
        a, c = (torch.stack((x & 15, x >> 4)) for x in (a, c))
    assert ((a.int() - c.int()).abs() <= 1).all()


FORMS = [
    (4, 2, 64, 64, False, None),
    (3, 1, 96, 96, False, "own"),
    (5, 5, 32, 16, True, "own"),
    (7, 1, 128, 128, True, None),
    (2, 2, 80, 32, False, "float32"),
    (6, 2, 40, 0, False, None),
]


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim", "rotary_dim", "is_interleaved", "norm"), FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_are_returned_and_keys_and_values_stored(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    is_interleaved: bool,
    norm: str | None,
    dtype: torch.dtype,
) -> None:
    heads = inputs(num_heads, num_kv_heads, head_dim, dtype)
    frequencies = torch.linspace(1, 0.01, rotary_dim // 2, device=DEVICE)
    cos, sin = EAGER.rotation(torch.tensor([0, 5, 900], device=DEVICE), frequencies, 1.25, dtype)
    weight = torch.rand(num_heads + num_kv_heads, head_dim, device=DEVICE) + 0.5
    options: dict[str, Any] = {"is_interleaved": is_interleaved}
    if norm is not None:
        options["norm"] = (weight.to(dtype if norm == "own" else torch.float32), 1e-5)
    slots = torch.tensor([17, 0, 63], device=DEVICE)
    got, expected = caches(num_kv_heads, 16, head_dim, dtype)
    queries = TRITON.rotate_and_store(NewHeads(heads, cos, sin, got, slots, **options))
    same = EAGER.rotate_and_store(NewHeads(heads, cos, sin, expected, slots, **options))
    tolerance = {"rtol": 2e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(queries, same, **tolerance)
    torch.testing.assert_close(got, expected, **tolerance)


@pytest.mark.parametrize("has_scales", [False, True])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("head_dim", [64, 24])
def test_quantized_rows_are_those_of_plain_torch(head_dim: int, dtype: torch.dtype, has_scales: bool) -> None:
    heads = inputs(3, 3, head_dim, torch.float32)
    heads[1, 4] = 0  # a row without values, and small ones, which are subnormal beside the greatest
    heads[2] *= torch.logspace(0, -6, head_dim, device=DEVICE)
    scales = torch.rand(2, 3, device=DEVICE) / 100 + 1e-3 if has_scales else None
    slots = torch.tensor([9, 8, 30], device=DEVICE)
    got, expected = caches(3, 8, head_dim, dtype, gap=16)
    k, v = heads[:, 3:6], heads[:, 6:]
    TRITON.write_kv(k, v, got, slots, scales)
    EAGER.write_kv(k, v, expected, slots, scales)
    assert_same_cache(got, expected)
    got = empty_cache(3, 8, head_dim, dtype, gap=16)
    cos = sin = torch.empty(NUM_TOKENS, 1, 0, device=DEVICE)
    assert torch.equal(TRITON.rotate_and_store(NewHeads(heads, cos, sin, got, slots, scales=scales)), heads[:, :3])
    assert_same_cache(got, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int8, torch.uint8, torch.float8_e5m2])
def test_the_cache_stays_finite(dtype: torch.dtype) -> None:
    x = torch.ones(NUM_TOKENS, 2, 32, device=DEVICE)
    x[0, 0, 3], x[1, 1, 0], x[2, 0, 31] = torch.inf, -torch.inf, torch.nan
    got, expected = caches(2, 16, 32, dtype)
    slots = torch.arange(NUM_TOKENS, device=DEVICE)
    TRITON.write_kv(x, -x, got, slots)
    EAGER.write_kv(x, -x, expected, slots)
    for cache in (got, expected):
        assert all(torch.isfinite(rows).all() for rows in EAGER.read_kv(cache, slots))
    assert_same_cache(got, expected)


def test_a_narrower_cache_holds_its_largest_number() -> None:
    x = torch.full((NUM_TOKENS, 1, 16), 1e9, device=DEVICE)
    cache = empty_cache(1, 16, 16, torch.float16)
    TRITON.write_kv(x, -x, cache, torch.arange(NUM_TOKENS, device=DEVICE))
    assert (cache[0, 0, 0, :NUM_TOKENS] == 65504).all()
    assert (cache[0, 1, 0, :NUM_TOKENS] == -65504).all()


def test_padding_is_not_stored() -> None:
    heads = inputs(2, 1, 32, torch.float32)
    slots = torch.tensor([-1, 20, -1], device=DEVICE)
    got, expected = caches(1, 16, 32, torch.float32)
    cos, sin = EAGER.rotation(torch.arange(3, device=DEVICE), torch.rand(16, device=DEVICE), 1.0, torch.float32)
    q = TRITON.rotate_and_store(NewHeads(heads, cos, sin, got, slots))
    EAGER.rotate_and_store(NewHeads(heads[1:2], cos[1:2], sin[1:2], expected, slots[1:2]))
    torch.testing.assert_close(got, expected)
    TRITON.write_kv(heads[:, 2:3], heads[:, 3:], got, slots)
    EAGER.write_kv(heads[1:2, 2:3], heads[1:2, 3:], expected, slots[1:2])
    assert torch.equal(got, expected)
    assert q.isfinite().all()


def test_heads_may_be_columns_of_a_wider_row() -> None:
    wide = inputs(4, 1, 64, torch.float32)
    cos, sin = EAGER.rotation(torch.arange(3, device=DEVICE), torch.rand(32, device=DEVICE), 1.0, torch.float32)
    for heads in (wide[:, 1:5], wide.transpose(0, 1).contiguous().transpose(0, 1)[:, :4]):
        got, expected = caches(1, 16, 64, torch.float32)
        slots = torch.arange(NUM_TOKENS, device=DEVICE)
        q = TRITON.rotate_and_store(NewHeads(heads, cos, sin, got, slots))
        torch.testing.assert_close(q, EAGER.rotate_and_store(NewHeads(heads, cos, sin, expected, slots)))
        torch.testing.assert_close(got, expected)
