"""Mixtures of experts with the real scheduler and worker: company, chunks, preemption and prefixes do not show."""

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
import torch

from quire.core.wire.protocol import RequestDelta
from quire.core.wire.rank import Rank
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.worker import Worker
from tests.executor.models.test_moe_models import VARIANTS
from tests.executor.paged_driver import Checkpoints
from tests.executor.step.test_model_runner import (
    LIMITS,
    engine_config,
    generate,
    mixed_requests,
    prompt_of,
    request,
    tokens_of,
)

torch.set_num_threads(1)

Generate = Callable[..., dict[str, list[RequestDelta]]]


@pytest.fixture(scope="module", params=["gpt_oss", "qwen3_moe"])
def served(request: pytest.FixtureRequest, checkpoint: Checkpoints) -> Generate:
    family, options = VARIANTS[request.param]
    limits = msgspec.structs.replace(LIMITS, block_size=4)
    worker = Worker(engine_config(checkpoint(family, **options), limits=limits), Rank(), ParallelGroup())
    ready = worker.load()
    worker.allocate(ready.num_pages, ready.max_model_len)
    return partial(generate, worker, block_size=4, kv_groups=ready.kv_groups)


@pytest.mark.parametrize(
    "options",
    [
        {"depth": 3},
        {"max_num_seqs": 5, "long_prefill_token_threshold": 7},
        {"max_num_batched_tokens": 40, "depth": 3, "max_num_seqs": 9},
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_company_or_chunks(served: Generate, options: dict[str, Any]) -> None:
    alone: dict[str, list[int]] = {}
    for one in mixed_requests():
        alone |= tokens_of(served([one], depth=1, enable_prefix_caching=False))
    assert len({tuple(row) for row in alone.values()}) == len(alone), "outputs must differ to prove anything"
    assert tokens_of(served(mixed_requests(), **options)) == alone


def test_tokens_do_not_depend_on_preemption(served: Generate) -> None:
    growing = [request(str(i), prompt_of(i, 3), max_tokens=100, temperature=0.8, seed=i) for i in range(8)]
    alone: dict[str, list[int]] = {}
    for one in growing:
        alone |= tokens_of(served([one], enable_prefix_caching=False))
    deltas = served(growing, num_pages=60)
    assert tokens_of(deltas) == alone
    assert any(delta.num_preemptions for entries in deltas.values() for delta in entries)


def test_tokens_after_a_prefix_are_the_same(served: Generate) -> None:
    shared = prompt_of(7, 100)
    both = [request("a", shared), request("b", [*shared, 5, 6, 7])]
    apart = tokens_of(served(both, enable_prefix_caching=False))
    deltas = served(both, max_num_seqs=1)
    assert tokens_of(deltas) == apart
    assert deltas["b"][0].num_cached_tokens >= 96
