"""Models with windows, driven by the real scheduler, which takes back the pages that slid out of a window."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from quire.core.wire.protocol import EngineRequest, RequestDelta
from quire.core.wire.rank import Rank
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.worker import Worker
from tests.executor.step.test_model_runner import (
    LIMITS,
    engine_config,
    generate,
    mixed_requests,
    prompt_of,
    request,
    tokens_of,
)

Generate = Callable[..., dict[str, list[RequestDelta]]]


CHUNK = 32


class Served(NamedTuple):
    folder: Path
    pages_of_one: int  # that the longest request of these tests needs, in chunks of CHUNK tokens
    generate: Generate


MODELS: dict[str, dict[str, Any]] = {
    "gemma3": {"sliding_window": 8, "num_hidden_layers": 6, "tie": True},
    "mistral": {"sliding_window": 12},
}


@pytest.fixture(scope="module", params=MODELS)
def served(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Served:
    folder = checkpoint(request.param, **MODELS[request.param])
    worker = Worker(
        engine_config(folder, limits=msgspec.structs.replace(LIMITS, block_size=4)), Rank(), ParallelGroup()
    )
    ready = worker.load()
    worker.allocate(ready.num_pages, ready.max_model_len)
    pages = sum(group.max_pages(128, block_size=4, largest_chunk=CHUNK) for group in ready.kv_groups)
    return Served(folder, pages, partial(generate, worker, block_size=4, kv_groups=ready.kv_groups))


@pytest.fixture(scope="module")
def expected(served: Served) -> dict[str, list[int]]:
    """Each request on its own, one step at a time, prompts whole, no prefix cache."""
    tokens: dict[str, list[int]] = {}
    for one in mixed_requests():
        tokens |= tokens_of(served.generate([one], depth=1, enable_prefix_caching=False))
    assert len({tuple(row) for row in tokens.values()}) == len(tokens), "outputs must differ to prove anything"
    return tokens


def test_greedy_tokens_are_transformers(served: Served) -> None:
    reference = AutoModelForCausalLM.from_pretrained(served.folder, dtype=torch.float32)
    prompts = [prompt_of(i, length) for i, length in enumerate([1, 16, 75])]
    got = tokens_of(served.generate([request(str(i), p, max_tokens=64) for i, p in enumerate(prompts)]))
    for i, prompt in enumerate(prompts):
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + got[str(i)]])).logits[0, len(prompt) - 1 : -1]
        assert got[str(i)] == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize(
    "options",
    [
        {"depth": 1},
        {"depth": 3},
        {"max_num_seqs": 5, "long_prefill_token_threshold": 7},
        {"max_num_batched_tokens": 40, "depth": 3, "max_num_seqs": 9},
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_company_or_chunks(
    served: Served, expected: dict[str, list[int]], options: dict[str, Any]
) -> None:
    assert tokens_of(served.generate(mixed_requests(), **options)) == expected


def test_tokens_do_not_depend_on_preemption(served: Served) -> None:
    """Short prompts are admitted together, and their outputs grow until the pool is too small."""
    growing = [request(str(i), prompt_of(i, 3), max_tokens=100, temperature=0.8, seed=i) for i in range(8)]
    alone: dict[str, list[int]] = {}
    for one in growing:
        alone |= tokens_of(served.generate([one], enable_prefix_caching=False))
    deltas = served.generate(growing, num_pages=served.pages_of_one, max_num_batched_tokens=CHUNK)
    assert tokens_of(deltas) == alone
    assert any(delta.num_preemptions for entries in deltas.values() for delta in entries)


def test_a_prefix_is_found_in_every_group(served: Served) -> None:
    """The second request continues the first one's prompt, whose last window pages are still cached."""
    shared = prompt_of(7, 100)

    def requests() -> list[EngineRequest]:
        return [request("a", shared), request("b", [*shared, 5, 6, 7])]

    apart = tokens_of(served.generate(requests(), enable_prefix_caching=False))
    deltas = served.generate(requests(), max_num_seqs=1)
    assert tokens_of(deltas) == apart
    assert deltas["b"][0].num_cached_tokens == 100
