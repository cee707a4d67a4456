"""Encoder inputs: encoded whole when a request is admitted, shared by equal ones, and freed with the last request."""

import random
from typing import Any

import msgspec
import pytest

from quire.core.wire.protocol import SequenceStart
from tests.core.scheduling.fake_worker import FULL, Harness, cross, expect_outputs, make_request, window

MOST = 40


def harness_of(**options: Any) -> Harness:
    return Harness(**{"kv_groups": [FULL, cross(MOST)], **options})


def input_of(number: int) -> list[int]:
    return [number * 100 + place for place in range(1 + 13 * number % MOST)]


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enable_prefix_caching": False},
        {"num_pages": 22},
        {"num_pages": 22, "enable_prefix_caching": False},
        {"max_num_seqs": 2},
        {"max_num_batched_tokens": MOST + 1, "policy": "priority"},
        {"long_prefill_token_threshold": 3},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 128},
        {"kv_groups": [FULL, window(9), cross(MOST), cross(MOST)]},
    ],
    ids=str,
)
def test_outputs_depend_on_requests_alone(options: dict[str, Any], depth: int) -> None:
    harness, rng = harness_of(depth=depth, **options), random.Random(str(options))
    requests = [
        make_request(
            str(index),
            [7] * rng.choice([1, 1, 5, 17]),
            encoder=input_of(rng.randrange(8)),
            seed=rng.choice([1, 2, 7]),
            priority=rng.randrange(3),
            max_tokens=rng.choice([1, 4, 20]),
            cache_salt=rng.choice([None, "salt"]),
        )
        for index in range(60)
    ]
    for number, each in enumerate(requests):
        assert harness.offer(each) is None
        if number % 3 == 0:
            harness.step()
    harness.run()
    expect_outputs(harness, requests)


def test_equal_inputs_are_encoded_once() -> None:
    """Those of one request's sequences in one plan, later ones, and not those of other inputs or salts."""
    harness = harness_of()
    request = make_request("a", [7], encoder=input_of(3))
    starts = [SequenceStart(f"a{index}", index) for index in range(4)]
    assert harness.offer(msgspec.structs.replace(request, sequences=starts)) is None
    harness.run()
    size = len(input_of(3))
    assert harness.worker.num_encoded_rows == size
    assert harness.scheduler.stats().num_prompt_tokens == size + 4
    harness.add("b", [7] * 9, encoder=input_of(3))
    harness.run()
    assert harness.worker.num_encoded_rows == size
    harness.add("c", [7], encoder=input_of(3), cache_salt="other")
    harness.add("d", [7], encoder=[*input_of(3)[:-1], 5])
    harness.run()
    assert harness.worker.num_encoded_rows == 3 * size


def test_the_decoders_prefix_is_found_behind_the_same_input_only() -> None:
    harness, prompt = harness_of(), [7] * 17
    for name, number, expected in (("a", 1, 0), ("b", 1, 16), ("c", 2, 0)):
        harness.add(name, prompt, encoder=input_of(number))
        harness.run()
        last = harness.streams[name].last
        assert last is not None
        assert last.num_cached_tokens == expected


def test_a_request_waits_for_a_step_that_holds_its_input() -> None:
    harness = harness_of(max_num_batched_tokens=MOST + 2)
    harness.add("first", [7] * 3, encoder=input_of(0), max_tokens=6)
    harness.plan()
    harness.result()
    harness.add("second", [8], encoder=list(range(MOST)))
    harness.add("third", [8], encoder=list(range(100, 100 + MOST)))
    plan = harness.plan()
    assert plan is not None
    assert plan.num_scheduled == [1, 1]
    harness.run()


@pytest.mark.parametrize(
    ("options", "encoder", "message"),
    [
        ({}, None, "the request has none; add encoder_prompt"),
        ({}, [], "at least one token"),
        ({}, [5] * (MOST + 1), f"encoder reads {MOST}"),
        ({"max_num_batched_tokens": 20}, [5] * 20, "with 1 of the decoder's, and --max-num-batched-tokens is 20"),
        ({"max_num_batched_tokens": 32, "enable_chunked_prefill": False}, [5] * 30, "with 3 of the decoder's"),
        ({"num_pages": 10}, [5] * MOST, "the KV cache holds 0"),
        ({"kv_groups": [FULL]}, [5], "for models with an encoder; this one has none"),
    ],
    ids=str,
)
def test_refusals(options: dict[str, Any], encoder: list[int] | None, message: str) -> None:
    failure = harness_of(**options).offer(make_request("a", 3, encoder=encoder))
    assert failure is not None
    assert message in failure.message
