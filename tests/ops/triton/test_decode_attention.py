"""Attention of rows with one query token each, against plain torch."""

from typing import Any

import pytest
import torch

from quire.ops.backend import AttentionForm
from quire.ops.triton.attention import MAX_PART_BYTES, Attention, parts_that_wait
from quire.ops.triton.backend import TritonBackend
from quire.ops.triton.decode_units import num_splits, split_len
from tests.ops.test_attention import Step
from tests.ops.triton.conftest import DEVICE
from tests.ops.triton.paged import ATTENTION, EAGER, FORMS, assert_equal_to_eager, rows_of, run

LENGTHS = [37, 300, 1]


def decode_step(lengths: list[int] = LENGTHS, **options: Any) -> Step:
    return Step(EAGER, [(1, length) for length in lengths], **options)


SHAPES = [
    {"num_heads": 2, "num_kv_heads": 2, "head_dim": 64},
    {"num_heads": 3, "num_kv_heads": 1, "head_dim": 80, "block_size": 8},
    {"num_heads": 4, "num_kv_heads": 1, "head_dim": 128, "dtype": torch.bfloat16},
    {"num_heads": 16, "num_kv_heads": 2, "head_dim": 32, "dtype": torch.float16, "block_size": 32},
    {"num_heads": 17, "num_kv_heads": 1, "head_dim": 96, "block_size": 128},
    {"num_heads": 71, "num_kv_heads": 1, "head_dim": 16, "block_size": 64},
    {"num_heads": 2, "num_kv_heads": 1, "head_dim": 192, "page_gap": 32},
    {"num_heads": 1, "num_kv_heads": 1, "head_dim": 256, "dtype": torch.bfloat16},
    {"num_heads": 4, "num_kv_heads": 1, "head_dim": 512, "dtype": torch.bfloat16},
]


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_of_models(shape: dict[str, Any]) -> None:
    step = decode_step(**shape)
    assert_equal_to_eager(step, run(step))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_quantized_caches(cache_dtype: torch.dtype, dtype: torch.dtype) -> None:
    step = decode_step([150, 3], num_heads=3, num_kv_heads=1, head_dim=40, dtype=dtype, cache_dtype=cache_dtype)
    assert_equal_to_eager(step, run(step))


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: dict[str, Any]) -> None:
    step = decode_step(
        [37, 1, 150],
        num_kv_heads=1,
        dtype=torch.float16,
        given_back=form.get("window") if "chunk" not in form else None,
    )
    assert_equal_to_eager(step, run(step, **form), **form)


@pytest.mark.parametrize("form", [{}, {"window": 6}, {"window": 6, "span_window": 4}])
def test_the_last_token_of_a_prefix_span_and_those_behind_it(form: dict[str, Any]) -> None:
    step = decode_step([20, 37, 12, 30], prefix_spans=[(0, 20), (0, 9), (0, 0), (11, 30)])
    assert_equal_to_eager(step, run(step, **form), **form)


def test_a_row_alone_has_the_bits_of_a_row_in_company(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its splits are merged by one program, by the last of several, or by one because no memory is left."""
    company = decode_step([300, 300, 40], num_heads=2, num_kv_heads=1, head_dim=16)
    alone = rows_of(company)
    alone = alone._replace(seq_lens=alone.seq_lens[:1], block_tables=alone.block_tables[:1])
    q, cache, form = company.q.to(DEVICE), company.kv_cache.to(DEVICE), AttentionForm(company.scale)
    outs = [
        ATTENTION.attend(q, cache, rows_of(company), form)[:1],
        ATTENTION.attend(q[:1], cache, alone, form),
        ATTENTION.attend(q[:1], cache, alone._replace(max_seq_len=40960), form),
    ]
    monkeypatch.setattr(ATTENTION, "num_programs", 1)
    outs.append(ATTENTION.attend(q, cache, rows_of(company), form)[:1])
    monkeypatch.setattr("quire.ops.triton.attention.MAX_PART_BYTES", 0)
    outs.append(ATTENTION.attend(q[:1], cache, alone, form))
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_padding_is_not_read_and_gives_zeros() -> None:
    step = decode_step([130, 37])
    expected, _ = run(step)
    rows = rows_of(step)
    padded = rows._replace(
        query_starts=torch.arange(6, dtype=torch.int32, device=DEVICE),
        seq_lens=torch.tensor([130, 0, 37, 0, 0], dtype=torch.int32, device=DEVICE),
        block_tables=torch.full((5, rows.block_tables.shape[1]), 10**6, dtype=torch.int32, device=DEVICE),
    )
    padded.block_tables[:3:2] = rows.block_tables
    step.q = torch.stack((step.q[0], step.q[1] * torch.nan, step.q[1], step.q[1] * torch.nan, step.q[0]))
    out, lse = run(step, padded)
    assert torch.equal(out[:3:2], expected)
    assert (out[[1, 3, 4]] == 0).all()
    assert (lse[[1, 3, 4]] == -torch.inf).all()


def test_counters_are_left_at_zero() -> None:
    step = decode_step([1040, 300], num_heads=1, num_kv_heads=1, head_dim=16)
    first, second = run(step), run(step)
    assert torch.equal(first[0], second[0])
    assert not ATTENTION._counters.any()


def test_a_sequence_has_at_most_the_splits_that_memory_is_made_for() -> None:
    for bound in (1, 128, 1024, 1025, 4097, 16500, 40960):
        assert max(-(-length // split_len(length)) for length in range(1, bound + 1)) == num_splits(bound)


def test_parts_take_no_more_memory_than_is_stated() -> None:
    assert 4 * 32 * (128 + 2) * parts_that_wait(512, num_splits(40960), 32, 128) <= MAX_PART_BYTES


def test_scratch_of_the_memory_plan_holds_the_parts() -> None:
    assert TritonBackend().scratch_bytes(torch.device("cuda"), 1, is_quantized=False) >= MAX_PART_BYTES


def test_counters_that_recordings_use_outlive_larger_ones() -> None:
    attention = Attention(torch.device(DEVICE))
    address = attention.counters(4).data_ptr()
    assert attention.counters(1 << 17).data_ptr() != address
    others = [torch.empty(1 << 16, dtype=torch.int32, device=DEVICE) for _ in range(4)]
    assert address not in {each.data_ptr() for each in others}
