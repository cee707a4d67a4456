"""A request's tokens depend only on the request: not on the batch, the chunks, the prefix cache or the workers."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from tests.checkpoints import VOCAB_SIZE

NUM_REQUESTS = 33
LENGTH: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}
BASE_OPTIONS = {"max_model_len": 256, "max_num_seqs": 64, "num_gpu_blocks_override": 1024}


def prompts() -> list[dict[str, list[int]]]:
    """Prompts of 3 to 131 tokens; every fourth begins with the same 40 tokens."""
    shared = [(7 * i + 3) % (VOCAB_SIZE - 3) + 3 for i in range(40)]
    rows = []
    for number in range(NUM_REQUESTS):
        own = [(number * 31 + 17 * i * i + i) % (VOCAB_SIZE - 3) + 3 for i in range(3 + 4 * number)]
        rows.append({"prompt_token_ids": (shared + own if number % 4 == 0 else own)[:160]})
    return rows


def params() -> list[SamplingParams]:
    """Greedy and seeded requests side by side, some with penalties or filters."""
    kinds = [
        SamplingParams(temperature=0, **LENGTH),
        SamplingParams(temperature=0.8, seed=11, **LENGTH),
        SamplingParams(temperature=1.2, top_p=0.9, top_k=40, seed=-5, **LENGTH),
        SamplingParams(temperature=0, presence_penalty=0.7, repetition_penalty=1.2, **LENGTH),
    ]
    return [kinds[number % len(kinds)] for number in range(NUM_REQUESTS)]


def tokens_of(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(prompts(), params(), use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> str:
    return str(checkpoint("qwen3"))


@pytest.fixture(scope="module")
def baseline(model: str) -> Iterator[LLM]:
    with LLM(model, **BASE_OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(baseline: LLM) -> list[list[int]]:
    """Tokens of a first pass: all requests together, nothing cached."""
    tokens = tokens_of(baseline)
    assert len({tuple(row) for row in tokens}) == NUM_REQUESTS, "the model's outputs must differ to prove anything"
    return tokens


def test_alone_or_among_32_others(baseline: LLM, expected: list[list[int]]) -> None:
    baseline.reset_prefix_cache()
    for number in (0, 1, 2, 3, 32):
        [output] = baseline.generate(prompts()[number], params()[number], use_tqdm=False)
        assert output.outputs[0].token_ids == expected[number]


def test_prefix_hit_or_miss(baseline: LLM, expected: list[list[int]]) -> None:
    assert tokens_of(baseline) == expected
    outputs = baseline.generate(prompts(), params(), use_tqdm=False)
    assert sum(output.num_cached_tokens or 0 for output in outputs) > 1000
    assert [output.outputs[0].token_ids for output in outputs] == expected


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            {"num_gpu_blocks_override": 40, "enable_prefix_caching": False, "async_scheduling": False},
            id="preempted-and-no-step-ahead",
        ),
        pytest.param({"tensor_parallel_size": 2, "max_num_batched_tokens": 16}, id="tensor-parallel-2-in-chunks-of-16"),
        pytest.param(
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "num_gpu_blocks_override": 40},
            id="two-stages-of-two-preempted",
        ),
    ],
)
def test_same_tokens_with(model: str, expected: list[list[int]], options: dict) -> None:
    with LLM(model, **(BASE_OPTIONS | options)) as llm:
        outputs = llm.generate(prompts(), params(), use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    if "num_gpu_blocks_override" in options:
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
