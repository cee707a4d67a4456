"""Scales behind the codes of their page, in plain torch: the numbers are those of scales behind each row."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.ops.backend import AttentionForm
from quire.ops.cache_pages import ScalePlanes, planes
from quire.ops.cache_rows import LARGEST_CODE, encode, in_octets
from quire.ops.eager.backend import EagerBackend
from quire.ops.eager.linear import PlainLinear
from quire.ops.latent import Selection
from tests.ops.test_attention import Step

IN_ROWS = EagerBackend(PlainLinear())
IN_PLANES = EagerBackend(PlainLinear(), pages=ScalePlanes())
CACHES = [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16]


def pages(dtype: torch.dtype, gap: int) -> Tensor:
    """Three pages of four tokens and two heads of 24, with a `gap` of bytes behind each."""
    page = IN_PLANES.kv_cache_shape(3, 4, 2, 24, dtype)[1:]
    size = math.prod(page) * dtype.itemsize
    return torch.zeros(3, size + gap, dtype=torch.uint8)[:, :size].view(dtype).unflatten(1, page)


@pytest.mark.parametrize("gap", [0, 16])
@pytest.mark.parametrize("has_scales", [False, True])
@pytest.mark.parametrize("dtype", CACHES)
def test_keys_and_values_are_those_of_rows(dtype: torch.dtype, has_scales: bool, gap: int) -> None:
    k, v = torch.randn(2, 3, 2, 24, generator=torch.Generator().manual_seed(1))
    scales = torch.tensor([[1.0, 0.37], [2.5, 0.011]]) if has_scales else None
    slots = torch.tensor([7, 2, 11])
    found = []
    for ops in (IN_ROWS, IN_PLANES):
        cache = pages(dtype, gap)
        ops.write_kv(k, v, cache, slots, scales)
        found.append(ops.read_kv(cache, slots))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("dtype", LARGEST_CODE)
def test_a_head_s_scales_follow_its_codes(dtype: torch.dtype) -> None:
    k, v = torch.randn(2, 4, 2, 24, generator=torch.Generator().manual_seed(1))
    cache = pages(dtype, 0)
    IN_PLANES.write_kv(k, v, cache, torch.arange(4, 8))
    codes, scales = planes(in_octets(cache[1]))
    own = in_octets(encode(torch.stack((k, v)), dtype)).transpose(1, 2)  # [2, heads, tokens, row]
    assert torch.equal(torch.cat((codes, scales), dim=-1), own)
    head = in_octets(cache[1]).flatten(2)[1, 0]
    assert torch.equal(head[: codes[1, 0].numel()].view_as(codes[1, 0]), codes[1, 0])
    assert torch.equal(
        head[codes[1, 0].numel() :].view(torch.float32),
        own[1, 0, :, -4:].contiguous().view(-1, 4).view(torch.float32).flatten(),
    )


STEPS: list[dict[str, Any]] = [{}, {"page_gap": 32}, {"given_back": 6}]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("dtype", CACHES)
def test_attention_has_the_bits_of_rows(dtype: torch.dtype, step: dict[str, Any]) -> None:
    rows = [(5, 40), (1, 17), (9, 9)]
    found = []
    for ops in (IN_ROWS, IN_PLANES):
        one = Step(ops, rows, cache_dtype=dtype, **step)
        form = AttentionForm(one.scale, step.get("given_back"))
        found.append(
            (
                ops.attention(one.q, one.kv_cache, one.batch, form),
                *ops.partial_attention(one.q, one.kv_cache, one.batch, form),
            )
        )
    assert all(map(torch.equal, *found))


def test_selected_tokens_have_the_bits_of_rows() -> None:
    found = []
    for ops in (IN_ROWS, IN_PLANES):
        step = Step(ops, [(1, 40), (1, 17)], cache_dtype=torch.int8)
        slots = torch.from_numpy(step.batch.block_tables[:, :1] * 16 + [[3, 0, 9], [2, 2, 2]]).int()
        found.append(ops.selected_attention(step.q, step.kv_cache, Selection(slots, torch.tensor([3, 1])), scale=0.2))
    assert torch.equal(*found)
