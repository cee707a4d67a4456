"""Attention of prompts, and of steps in which some rows have one new token, against plain torch."""

from typing import Any

import pytest
import torch

from quire.ops.backend import AttentionForm
from quire.ops.triton.attention import covers
from quire.ops.triton.backend import TritonBackend
from quire.ops.triton.prompt_attention import num_blocks
from tests.ops.test_attention import Step
from tests.ops.triton.conftest import DEVICE
from tests.ops.triton.paged import ATTENTION, EAGER, FORMS, assert_equal_to_eager, rows_of, run

MIXED = [(1, 37), (5, 5), (20, 90)]


@pytest.mark.parametrize(
    "shape",
    [
        {"num_heads": 2, "num_kv_heads": 2, "head_dim": 64},
        {"num_heads": 3, "num_kv_heads": 1, "head_dim": 80, "block_size": 8, "dtype": torch.bfloat16},
        {"num_heads": 8, "num_kv_heads": 1, "head_dim": 128, "dtype": torch.float16},
        {"num_heads": 71, "num_kv_heads": 1, "head_dim": 16, "block_size": 64, "dtype": torch.float16},
        {"num_heads": 2, "num_kv_heads": 1, "head_dim": 192, "page_gap": 32, "dtype": torch.float16},
        {"num_heads": 1, "num_kv_heads": 1, "head_dim": 256, "block_size": 128, "dtype": torch.bfloat16},
        {"num_heads": 2, "num_kv_heads": 2, "head_dim": 512, "dtype": torch.bfloat16},
        {"num_heads": 9, "num_kv_heads": 1, "head_dim": 512, "page_gap": 64, "dtype": torch.float16},
    ],
)
def test_shapes_of_models(shape: dict[str, Any]) -> None:
    step = Step(EAGER, MIXED, **shape)
    assert_equal_to_eager(step, run(step))


@pytest.mark.parametrize("form", [{"window": 20}, {"softcap": 3.0, "sinks": torch.tensor([0.5, -1.0])}], ids=str)
def test_programs_that_share_the_values_of_a_head_have_its_form(form: dict[str, Any]) -> None:
    step = Step(EAGER, [(30, 70), (3, 3)], num_heads=2, num_kv_heads=1, head_dim=512, dtype=torch.bfloat16)
    assert_equal_to_eager(step, run(step, **form), **form)


@pytest.mark.parametrize("shape", [{"head_dim": 384}, {"head_dim": 512, "cache_dtype": torch.int8}], ids=str)
def test_heads_without_tiles_are_left_to_torch(shape: dict[str, Any]) -> None:
    step = Step(EAGER, [(2, 5)], num_heads=2, num_kv_heads=1, dtype=torch.bfloat16, **shape)
    assert not covers(step.q, step.kv_cache, rows_of(step), AttentionForm(step.scale))


@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_quantized_caches(cache_dtype: torch.dtype) -> None:
    step = Step(EAGER, [(9, 70), (2, 2)], dtype=torch.bfloat16, cache_dtype=cache_dtype)
    assert_equal_to_eager(step, run(step))


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: dict[str, Any]) -> None:
    step = Step(
        EAGER,
        MIXED,
        num_kv_heads=1,
        dtype=torch.float16,
        given_back=form.get("window") if "chunk" not in form else None,
    )
    assert_equal_to_eager(step, run(step, **form), **form)


@pytest.mark.parametrize("form", [{}, {"window": 5}, {"window": 5, "span_window": 4}])
def test_tokens_of_a_prefix_span_see_each_other(form: dict[str, Any]) -> None:
    rows, spans = [(30, 30), (4, 40), (12, 20), (1, 9), (33, 50)], [(0, 20), (0, 38), (0, 20), (0, 9), (22, 41)]
    step = Step(EAGER, rows, prefix_spans=spans, dtype=torch.bfloat16)
    assert_equal_to_eager(step, run(step, **form), **form)


def test_one_prompt_of_several_blocks() -> None:
    step = Step(EAGER, [(70, 75)], num_heads=4, num_kv_heads=1, dtype=torch.bfloat16)
    assert_equal_to_eager(step, run(step))


def test_padding_is_not_read() -> None:
    step = Step(EAGER, [(5, 9), (3, 70)])
    expected, _ = run(step)
    rows = rows_of(step)
    tables = torch.full((4, rows.block_tables.shape[1]), 10**6, dtype=torch.int32, device=DEVICE)
    tables[:2] = rows.block_tables
    padded = rows._replace(
        query_starts=torch.tensor([0, 5, 8, 8, 8], dtype=torch.int32, device=DEVICE),
        seq_lens=torch.tensor([9, 70, 0, 0], dtype=torch.int32, device=DEVICE),
        block_tables=tables,
    )
    step.q = torch.cat((step.q, step.q[:2] * torch.nan))
    assert torch.equal(run(step, padded)[0][:8], expected)


def test_a_decode_beside_prompts_has_its_bits_of_a_decode_step() -> None:
    step = Step(EAGER, [(6, 20), (1, 150), (4, 4)], dtype=torch.bfloat16)
    rows = rows_of(step)
    alone = rows._replace(
        query_starts=torch.arange(2, dtype=torch.int32, device=DEVICE),
        seq_lens=rows.seq_lens[1:2],
        block_tables=rows.block_tables[1:2],
        max_query_len=1,
    )
    q, cache, form = step.q.to(DEVICE), step.kv_cache.to(DEVICE), AttentionForm(step.scale)
    mixed = ATTENTION.attend(q, cache, rows, form)
    assert torch.equal(mixed[6:7], ATTENTION.attend(q[6:7], cache, alone, form))


def test_there_is_a_block_for_each_query() -> None:
    for lens in ([1], [5], [1, 1, 1], [4, 4], [3, 9, 1], [16, 1, 15]):
        starts = [sum(lens[:row]) for row in range(len(lens))]
        first_blocks = [start // 4 + row for row, start in enumerate(starts)]
        ends = [first + -(-length // 4) for first, length in zip(first_blocks, lens, strict=True)]
        assert all(end <= first for end, first in zip(ends, first_blocks[1:], strict=False))
        assert ends[-1] <= num_blocks(sum(lens), len(lens), 4)


@pytest.mark.parametrize("rows", [[(1, 40), (1, 9)], [(1, 20), (6, 30)]])
def test_the_backend_attends_by_kernels_and_leaves_the_rest_to_torch(rows: list[tuple[int, int]]) -> None:
    ops, form = TritonBackend(), AttentionForm(0.3, softcap=2.0)
    for options in ({"dtype": torch.bfloat16, "num_heads": 2, "num_kv_heads": 1}, {"head_dim": 12}):
        step = Step(EAGER, rows, **options)
        plan, q, cache = step.batch, step.q.to(DEVICE), step.kv_cache.to(DEVICE)
        slots = plan.slot_mapping.to(DEVICE)
        batch = ops.attention_batch(
            plan.query_lens, plan.seq_lens, plan.block_tables, slots, block_size=plan.block_size
        )
        expected = EAGER.partial_attention(step.q, step.kv_cache, plan, form)
        for got, same in zip(ops.partial_attention(q, cache, batch, form), expected, strict=True):
            torch.testing.assert_close(got.cpu(), same, rtol=1.6e-2, atol=1e-2)
        torch.testing.assert_close(ops.attention(q, cache, batch, form).cpu(), expected[0], rtol=1.6e-2, atol=1e-2)
