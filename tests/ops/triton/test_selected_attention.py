"""Attention to selected keys, and the merge of parts, against plain torch."""

import pytest
import torch

from quire.ops.backend import AttentionForm
from quire.ops.latent import Selection
from quire.ops.triton.backend import TritonBackend
from tests.ops.test_attention import Step
from tests.ops.triton.conftest import DEVICE
from tests.ops.triton.paged import EAGER

TRITON = TritonBackend()


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size", "dtype", "cache_dtype"),
    [
        (4, 2, 64, 16, torch.float32, None),
        (3, 1, 80, 8, torch.bfloat16, None),
        (2, 1, 32, 128, torch.float16, torch.int8),
        (2, 1, 12, 16, torch.float32, None),  # left to torch
    ],
)
def test_tokens_see_the_slots_that_are_selected_for_them(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None,
) -> None:
    step = Step(
        EAGER, [(2, 90), (1, 30)], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
        block_size=block_size, dtype=dtype, cache_dtype=cache_dtype,
    )  # fmt: skip
    tables = torch.from_numpy(step.batch.block_tables)
    slots = torch.full((3, 70), int(tables[0, 0]) * block_size, dtype=torch.int32)
    counts = torch.tensor([67, 1, 30])
    random = torch.Generator().manual_seed(1)
    for token, (row, count) in enumerate(zip([0, 0, 1], counts.tolist(), strict=True)):
        positions = torch.randperm(int(step.seq_lens[row]), generator=random)[:count]
        slots[token, :count] = tables[row, positions // block_size] * block_size + positions % block_size
    expected = EAGER.selected_attention(step.q, step.kv_cache, Selection(slots, counts), scale=0.2)
    there = Selection(slots.to(DEVICE), counts.to(DEVICE))
    got = TRITON.selected_attention(step.q.to(DEVICE), step.kv_cache.to(DEVICE), there, scale=0.2)
    tolerance = 1e-5 if dtype == torch.float32 else 1.6e-2
    torch.testing.assert_close(got.cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("num_parts", [1, 2, 5])
def test_parts_are_merged_by_their_shares(num_parts: int) -> None:
    random = torch.Generator().manual_seed(num_parts)
    parts = []
    for _ in range(num_parts):
        sums = 30 * torch.randn(7, 3, generator=random)
        sums[torch.rand(7, 3, generator=random) < 0.4] = -torch.inf
        parts.append((torch.randn(7, 3, 40, generator=random), sums))
    parts[0][1][:, 0] = 1.0  # every token sees a key of some part
    parts[-1][1][:, 1:] = -200.0
    for out, sums in parts:
        out[sums == -torch.inf] = torch.nan  # undefined
    got = TRITON.merge_attention([(out.to(DEVICE), sums.to(DEVICE)) for out, sums in parts])
    torch.testing.assert_close(got.cpu(), EAGER.merge_attention(parts), rtol=1e-5, atol=1e-5)


def test_parts_of_an_attention_merge_to_the_whole() -> None:
    step = Step(EAGER, [(1, 50), (1, 10)], dtype=torch.bfloat16, num_heads=2, num_kv_heads=1)
    plan, q, cache = step.batch, step.q.to(DEVICE), step.kv_cache.to(DEVICE)
    slots = plan.slot_mapping.to(DEVICE)
    batch = TRITON.attention_batch(plan.query_lens, plan.seq_lens, plan.block_tables, slots, block_size=16)
    parts = [
        TRITON.partial_attention(q, cache, batch, AttentionForm(step.scale, chunk=16, chunks=chunks))
        for chunks in ("own", "previous", "earlier")
    ]
    got = TRITON.merge_attention(parts)
    torch.testing.assert_close(got.cpu(), step.run(), rtol=1.6e-2, atol=1.6e-2)
