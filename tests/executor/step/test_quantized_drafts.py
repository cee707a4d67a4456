"""Rows yield the same tokens with drafts as without, where weights, keys and values are quantized."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from quire.core.config.cache import CacheConfig
from quire.core.wire.protocol import RequestDelta
from quire.core.wire.rank import Rank
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.worker import Worker
from tests.executor.step.test_drafts import ToldDrafter, check_same, requests_of_all_kinds, told
from tests.executor.step.test_model_runner import NUM_BLOCKS, engine_config, generate


def cache(kind: Any) -> dict[str, Any]:
    return {"cache": CacheConfig(num_gpu_blocks_override=NUM_BLOCKS, kv_cache_dtype=kind)}


FORMATS: dict[str, dict[str, Any]] = {
    "fp8 cache": cache("fp8"),
    "int8 cache": cache("int8"),
    "int4 cache": cache("int4"),
    "int8 weights": {"quantization": "int8"},
    "int4 weights": {"quantization": "int4"},
    "fp8 weights, int8 cache": {"quantization": "fp8", **cache("int8")},
}


def serve(folder: Path, changes: dict[str, Any], drafter: ToldDrafter | None = None) -> Callable[..., Any]:
    worker = Worker(engine_config(folder, **changes), Rank(), ParallelGroup(), speculator=drafter)
    ready = worker.load()
    worker.allocate(ready.num_pages, ready.max_model_len)
    return partial(generate, worker, kv_groups=ready.kv_groups)


@pytest.mark.parametrize("changes", FORMATS.values(), ids=FORMATS)
def test_tokens_are_those_without_drafts(checkpoint: Callable[..., Path], changes: dict[str, Any]) -> None:
    folder = checkpoint("qwen3")
    requests = requests_of_all_kinds()
    without: dict[str, list[RequestDelta]] = serve(folder, changes)(requests)
    drafter = told(without, requests)
    got = serve(folder, changes, drafter)(requests, depth=2, max_num_batched_tokens=40)
    check_same(got, without)
    lengths = [len(delta.token_ids) for deltas in got.values() for delta in deltas]
    assert sum(length > 1 for length in lengths) > 50
    assert drafter.num_proposed > sum(lengths) - len(lengths)  # some were wrong
