"""Runs the ranks that divide sequences: real workers in threads of one process, each driven by the real scheduler."""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import msgspec

from quire.core.config.cache import CacheConfig, KVCacheDtype
from quire.core.config.model import ModelImplementation
from quire.core.wire.protocol import EngineRequest, RequestDelta
from quire.core.wire.rank import Layout
from quire.executor.parallel.context import divided
from quire.executor.parallel.groups import _context_groups
from quire.executor.worker import Worker
from tests.executor.models.test_hybrid_models import folder as hybrid  # noqa: F401
from tests.executor.step.test_embedded_prompts import embedded, rows_of
from tests.executor.step.test_model_runner import (
    LIMITS,
    engine_config,
    generate,
    mixed_requests,
    prompt_of,
    request,
    tokens_of,
)
from tests.executor.thread_group import ThreadGroup

BLOCK_SIZE = 4
"""Slots of a page on a rank."""

GATHERED_BYTES = 1024
"""Of four tokens, in models as small as these; steps with prompts have up to 24 on a rank."""


def groups_of(layout: Layout) -> list[dict[int, ThreadGroup]]:
    """By a worker's number, the threads that divide weights with it, and those that divide positions."""
    firsts = range(0, layout.num_workers, layout.tensor)
    return [
        made(division) for division in ([list(range(n, n + layout.tensor)) for n in firsts], _context_groups(layout))
    ]


def made(divisions: list[list[int]]) -> dict[int, ThreadGroup]:
    """Groups of threads, by the numbers of their members."""
    return {
        number: group
        for numbers in divisions
        for number, group in zip(numbers, ThreadGroup.all_of(len(numbers)), strict=True)
    }


class Watched:
    """Keeps the arguments of all calls of a method."""

    def __init__(self, thing: Any, name: str) -> None:
        self.calls: list[Any] = []
        self._method = getattr(thing, name)
        setattr(thing, name, self)

    def __call__(self, *args: Any) -> Any:
        self.calls.append(args)
        return self._method(*args)


class RankRun(NamedTuple):
    """What a rank did.

    Attributes:
        tokens: generated, by request.
        scores: of the scored prompt, log-probabilities by position.
        page_bytes: of a page of BLOCK_SIZE slots.
        share: of the tokens of all steps, how many went through the rank's layers.
    """

    tokens: dict[str, list[int]]
    scores: dict[int, list[float]]
    page_bytes: int
    share: float


def requests() -> list[EngineRequest]:
    """The mixed ones are those of which eight at a time take the most pages, and each kind twice."""
    return [
        *mixed_requests()[6:18],
        request("scored", prompt_of(50, 60), prompt_logprobs=2),
        embedded("embedded", rows_of(7, 75)),
    ]


def scores_of(deltas: list[RequestDelta]) -> dict[int, list[float]]:
    parts = [delta.output for delta in deltas if delta.output is not None]
    return {part.start + number: entry.logprobs for part in parts for number, entry in enumerate(part.positions)}


BUILDING = threading.Lock()
"""Ranks are processes, and do not share Transformers' tables."""


def run_on_ranks(
    folder: Path, layout: Layout, run: int, cache: CacheConfig, implementation: ModelImplementation = "auto"
) -> list[RankRun]:
    """Runs all ranks of a layout without stages.

    In chunks of prompts, queries or keys travel from rank to rank; in decode steps, ranks gather their queries.
    """
    size, part = layout.num_workers, layout.sequence
    tensor, context = groups_of(layout)
    config = engine_config(
        folder,
        limits=msgspec.structs.replace(LIMITS, block_size=BLOCK_SIZE * part),
        cache=cache,
        layout=layout,
        cp_kv_cache_interleave_size=run,
    )
    config = msgspec.structs.replace(config, spec=msgspec.structs.replace(config.spec, implementation=implementation))

    def on_rank(rank: int) -> RankRun:
        try:
            worker = Worker(config, layout.ranks()[rank], tensor[rank], context_group=context[rank])
            with BUILDING:
                ready = worker.load()
            worker.allocate(ready.num_pages, ready.max_model_len)
            asked, computed = Watched(worker, "launch"), Watched(worker.get_model(), "forward")
            # In chunks, a few at once, so that later ones find beginnings of prompts in the prefix cache.
            deltas = generate(
                worker, requests(), num_pages=ready.num_pages, kv_groups=ready.kv_groups,
                block_size=BLOCK_SIZE * part, max_num_seqs=8, max_num_batched_tokens=48,
            )  # fmt: skip
            num_asked = sum(sum(plan.num_scheduled) for (plan,) in asked.calls)
            num_computed = sum(len(token_ids) for token_ids, _ in computed.calls)
            return RankRun(
                tokens_of(deltas), scores_of(deltas["scored"]), ready.kv_groups[0].page_bytes, num_computed / num_asked
            )
        except BaseException:
            for group in (tensor[rank], context[rank]):
                group.meeting.abort()
            raise

    with ThreadPoolExecutor(size) as pool, mock.patch.object(divided, "GATHERED_BYTES", GATHERED_BYTES):
        return list(pool.map(on_rank, range(size)))


@functools.cache
def _run_whole(folder: Path, num_pages: int, dtype: KVCacheDtype, implementation: ModelImplementation) -> RankRun:
    cache = CacheConfig(num_gpu_blocks_override=num_pages, kv_cache_dtype=dtype)
    [whole] = run_on_ranks(folder, Layout(), 1, cache, implementation)
    return whole


def run_whole(folder: Path, cache: CacheConfig, implementation: ModelImplementation = "auto") -> RankRun:
    """What one worker does alone, once for all cases with this model and cache."""
    assert cache.num_gpu_blocks_override is not None
    return _run_whole(folder, cache.num_gpu_blocks_override, cache.kv_cache_dtype, implementation)


ROOM, LITTLE_ROOM = CacheConfig(num_gpu_blocks_override=400), CacheConfig(num_gpu_blocks_override=100)
BOTH = Layout(prefill=2, tensor=2, context=2)
