"""Encoders, of which no group keeps anything: prompts are computed whole, beside others, and never again."""

import random
from typing import Any

import msgspec
import pytest

from quire.core.wire.pooling import Pooling
from quire.core.wire.protocol import EngineRequest, FinishReason
from quire.core.wire.row_outputs import RequestFailure
from tests.core.scheduling.fake_worker import Harness, make_request


def encode(name: str, num_tokens: int, **fields: Any) -> EngineRequest:
    return msgspec.structs.replace(make_request(name, num_tokens), pooling=Pooling("last"), **fields)


def encoder(**options: Any) -> Harness:
    return Harness(kv_groups=[], num_pages=0, whole_prompts=True, **options)


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"max_num_seqs": 2},
        {"max_num_batched_tokens": 40},
        {"enable_chunked_prefill": False},
        {"policy": "priority"},
    ],
    ids=str,
)
def test_prompts_are_computed_whole_beside_others(limits: dict[str, Any], depth: int) -> None:
    harness, rng = encoder(depth=depth, **limits), random.Random(str(limits))
    lengths = {str(index): rng.choice([1, 3, 9, 25, 40]) for index in range(100)}
    for name, length in lengths.items():
        assert harness.offer(encode(name, length, priority=rng.randrange(3))) is None
    harness.run()
    assert all(stream.finish_reason is FinishReason.STOP for stream in harness.streams.values())
    scheduled = [count for plan in harness.plans for count in plan.num_scheduled]
    assert sorted(scheduled) == sorted(lengths.values())
    assert all(start == 0 for plan in harness.plans for start in plan.num_computed)
    stats = harness.scheduler.stats()
    assert (stats.num_preemptions, stats.prefix_cache_queries) == (0, 0)
    assert stats.num_prompt_tokens == sum(lengths.values())


def test_rows_are_packed_by_tokens() -> None:
    harness, rng = encoder(max_num_seqs=100), random.Random(0)
    for index in range(100):
        assert harness.offer(encode(str(index), rng.choice([1, 3, 9, 25, 40]))) is None
    harness.run()
    *full, _ = [sum(plan.num_scheduled) for plan in harness.plans]
    assert min(full) > harness.limits.max_num_batched_tokens - 40


def test_equal_prompts_share_nothing() -> None:
    harness = encoder()
    for name in "ab":
        assert harness.offer(encode(name, 30)) is None
        harness.run()
    assert [plan.num_computed for plan in harness.plans] == [[0], [0]]


def refusal(harness: Harness, request: EngineRequest) -> RequestFailure:
    failure = harness.offer(request)
    assert failure is not None
    assert failure.kind == "invalid"
    return failure


def test_what_no_step_can_compute_is_refused() -> None:
    harness = encoder(max_num_batched_tokens=20)
    assert "--max-num-batched-tokens is 20" in refusal(harness, encode("a", 21)).message
    harness = encoder(max_num_batched_tokens=300)
    assert "129 tokens, but the model computes 128" in refusal(harness, encode("a", 129)).message
    assert harness.offer(encode("b", 128)) is None
    harness.run()


def test_text_is_refused() -> None:
    assert "generates no text" in refusal(encoder(), make_request("a", 5)).message


@pytest.mark.parametrize(
    ("types", "message"), [([0, 1], "2 numbers for a prompt of 3"), ([0, 1, 2], "0 to 1"), ([-1, 0, 0], "-1 to 0")]
)
def test_segments_that_the_model_lacks_are_refused(types: list[int], message: str) -> None:
    harness = encoder(num_token_types=2)
    assert message in refusal(harness, encode("a", 3, token_type_ids=types)).message
    assert harness.offer(encode("b", 3, token_type_ids=[0, 1, 1])) is None
    harness.run()
    assert harness.plans[0].admitted[0].token_type_ids == [0, 1, 1]
    assert "0 to 0" in refusal(encoder(), encode("c", 3, token_type_ids=[0, 1, 1])).message
