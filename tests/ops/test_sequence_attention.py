"""Attention in both directions within sequences, against torch's own attention of each sequence alone."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.backend import AttentionForm, Backend, PairBias

torch.set_num_threads(1)

LENGTHS = [1, 7, 64, 33, 130, 2, 1, 300]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def expected(heads: Tensor, num_kv_heads: int, lengths: list[int], form: AttentionForm) -> Tensor:
    """torch's attention in float64, one sequence after the other."""
    results, first = [], 0
    num_heads = heads.shape[1] - 2 * num_kv_heads
    for length in lengths:
        own = heads[first : first + length].double().transpose(0, 1)
        q, k, v = own.split((num_heads, num_kv_heads, num_kv_heads))
        k, v = (x.repeat_interleave(num_heads // num_kv_heads, dim=0) for x in (k, v))
        distance = torch.arange(length) - torch.arange(length).unsqueeze(1)  # key less query
        bias = torch.zeros(num_heads, length, length, dtype=torch.float64)
        if form.window is not None:
            bias.masked_fill_(distance.abs() >= form.window, -torch.inf)
        if form.distance_bias is not None:
            reach = form.distance_bias.shape[1] // 2
            bias += form.distance_bias[:, distance.clamp(-reach, reach) + reach]
        if (pair := form.pair_bias) is not None:
            place = distance + len(pair.query_buckets) // 2
            for head in range(num_heads):
                for query in range(length):
                    for key in range(length):
                        at = place[query, key]
                        bias[head, query, key] += (
                            pair.of_queries[first + query, head, pair.query_buckets[at]]
                            + pair.of_keys[first + key, head, pair.key_buckets[at]]
                        ).double()
        results.append(F.scaled_dot_product_attention(q, k, v, bias, scale=form.scale).transpose(0, 1))
        first += length
    return torch.cat(results)


FORMS: dict[str, dict[str, Any]] = {
    "all tokens": {},
    "the token alone": {"window": 1},
    "narrow window": {"window": 5},
    "window": {"window": 65},
    "wide window": {"window": 200},
    "distance bias": {"distance_bias": random(4, 2 * 12 + 1, seed=3)},
    "window and far bias": {"window": 40, "distance_bias": random(4, 2 * 500 + 1, seed=4)},
}


def attend(
    ops: Backend, heads: Tensor, num_kv_heads: int, lengths: list[int], form: AttentionForm, **options: Any
) -> Tensor:
    batch = ops.sequence_batch(np.array(lengths), heads.device)
    return ops.sequence_attention(heads, num_kv_heads, batch, form, **options)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("num_kv_heads", [4, 1])
def test_forms(ops: Backend, num_kv_heads: int, name: str) -> None:
    heads, form = random(sum(LENGTHS), 4 + 2 * num_kv_heads, 32), AttentionForm(0.2, **FORMS[name])
    got = attend(ops, heads, num_kv_heads, LENGTHS, form)
    assert got.shape == (sum(LENGTHS), 4, 32)
    torch.testing.assert_close(got.double(), expected(heads, num_kv_heads, LENGTHS, form), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [8, 17, 32, 64, 80])
def test_half_precision(ops: Backend, head_dim: int, dtype: torch.dtype) -> None:
    heads, form = random(sum(LENGTHS), 6, head_dim, dtype=dtype), AttentionForm(head_dim**-0.5, 20)
    got = attend(ops, heads, 2, LENGTHS, form)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected(heads, 2, LENGTHS, form), atol=2e-2, rtol=2e-2)


def test_rotation(ops: Backend) -> None:
    heads, lengths, form = random(60, 8, 32), [11, 1, 48], AttentionForm(0.3)
    positions = torch.cat([torch.arange(length) for length in lengths])
    cos, sin = ops.rotation(positions, torch.logspace(0, -3, 16), 1.0, torch.float32)
    rotated = torch.cat((ops.rotary(heads[:, :6], cos, sin), heads[:, 6:]), dim=1)
    got = attend(ops, heads, 2, lengths, form, rotation=(cos, sin))
    torch.testing.assert_close(got.double(), expected(rotated, 2, lengths, form), atol=1e-5, rtol=1e-5)


def test_biases_of_pairs(ops: Backend) -> None:
    lengths = [1, 9, 20, 3]
    random_buckets = torch.randint(0, 6, (2, 2 * 25 + 1), generator=torch.Generator().manual_seed(5))
    bias = PairBias(random(33, 2, 6, seed=1), random(33, 2, 6, seed=2), *random_buckets)
    heads, form = random(33, 6, 16), AttentionForm(0.25, pair_bias=bias)
    got = attend(ops, heads, 2, lengths, form)
    torch.testing.assert_close(got.double(), expected(heads, 2, lengths, form), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 30])
def test_a_sequence_does_not_depend_on_its_company(native: Backend, window: int | None) -> None:
    heads, form, first = random(sum(LENGTHS), 6, 32), AttentionForm(0.2, window), 0
    together = attend(native, heads, 2, LENGTHS, form)
    for length in LENGTHS:
        own = slice(first, first + length)
        assert torch.equal(attend(native, heads[own], 2, [length], form), together[own])
        first += length


def test_heads_that_are_part_of_wider_rows(ops: Backend) -> None:
    rows, form = random(40, 9 * 32), AttentionForm(0.2)
    heads = rows[:, 32:].unflatten(1, (8, 32))
    got = attend(ops, heads, 2, [15, 25], form)
    torch.testing.assert_close(got, attend(ops, heads.contiguous(), 2, [15, 25], form))
