"""Prefill policies limit a step's part of a prompt."""

from quire.core.config.resolved import SchedulerLimits
from quire.core.scheduling.prefill import ChunkedPrefill, WholePrefill


def limits(**options: int) -> SchedulerLimits:
    return SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=10, **options)


def test_chunks_are_bounded_by_budget_and_threshold() -> None:
    assert [ChunkedPrefill(limits()).chunk_size(num, 8, 100) for num in (3, 8, 20)] == [3, 8, 8]
    assert [ChunkedPrefill(limits(long_prefill_token_threshold=5)).chunk_size(num, 8, 100) for num in (3, 8, 20)] == [
        3,
        5,
        5,
    ]


def test_a_chunk_ends_where_a_snapshot_is_due() -> None:
    assert [ChunkedPrefill(limits()).chunk_size(num, 8, 6) for num in (3, 6, 20)] == [3, 6, 6]


def test_whole_prompts_wait_for_a_step_with_room() -> None:
    whole = WholePrefill(limits())
    assert [whole.chunk_size(8, budget, 3) for budget in (10, 8, 7)] == [8, 8, 0]
    assert whole.chunk_size(11, 10, 3) == 10  # a recomputation that no step could hold
