"""Sequences whose positions several ranks divide, against one worker: real workers, driven by the real scheduler."""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from quire.core.config.cache import CacheConfig, KVCacheDtype
from quire.core.errors import ModelLoadError
from quire.core.wire.kv_groups import KVGroupSpec
from quire.core.wire.protocol import EngineRequest, RequestDelta
from quire.core.wire.rank import Layout, Rank
from quire.executor.parallel.groups import ParallelGroup, _context_groups
from quire.executor.parallel.sequence_shard import SequenceShard
from quire.executor.step.input_batch import InputBatch
from quire.executor.step.partial_rows import PartialRows
from quire.executor.worker import Worker
from tests.executor.layers.test_layers import ThreadGroup
from tests.executor.models.test_hybrid_models import Folder
from tests.executor.models.test_hybrid_models import folder as hybrid  # noqa: F401
from tests.executor.paged_driver import Checkpoints
from tests.executor.step.test_embedded_prompts import embedded, rows_of
from tests.executor.step.test_model_runner import (
    LIMITS,
    engine_config,
    generate,
    mixed_requests,
    prompt_of,
    request,
    start_worker,
    tokens_of,
)

torch.set_num_threads(1)

BLOCK_SIZE = 4
"""Slots of a page on a rank."""


def test_ranks_divide_the_positions() -> None:
    shards = [SequenceShard(rank, 3, 2) for rank in range(3)]
    counts = np.array([shard.num_own(np.arange(14)) for shard in shards])
    assert counts.sum(axis=0).tolist() == list(range(14))
    assert counts[:, 9].tolist() == [4, 3, 2]
    assert torch.equal(shards[1].num_own(torch.arange(14)), torch.from_numpy(counts[1]))
    # Pages 7 and 5 with room for twelve tokens: each rank has four slots of each, and page 9 is spare.
    positions = np.arange(20)
    slots = [shard.slots(np.where(positions < 12, 7, 5), positions % 12, 12, 9) for shard in shards]
    assert slots[0].tolist()[:8] == [28, 29, 36, 37, 36, 37, 30, 31]
    assert slots[1].tolist()[12:] == [36, 37, 20, 21, 36, 37, 38, 39]
    owners = sum((own // 4 != 9).astype(int) for own in slots)
    assert owners.tolist() == [1] * 20


@pytest.mark.parametrize(("size", "run"), [(2, 1), (3, 1), (2, 4)])
def test_prompts_are_few_rows(size: int, run: int) -> None:
    """A prompt of 50 tokens after 7 others, a decode, a prompt of 13, and one of which no key is on some ranks."""
    query_lens, seq_lens = np.array([50, 1, 13, 2]), np.array([57, 30, 13, 2])
    sequences = np.repeat(np.arange(4), query_lens)
    positions = np.concatenate([np.arange(end - n, end) for n, end in zip(query_lens, seq_lens, strict=True)])
    batch = build_batch(query_lens, seq_lens)
    num_rows = []
    for rank in range(size):
        shard = SequenceShard(rank, size, run)
        rows = PartialRows.of_step(shard, batch, query_lens)
        order, back = rows.sight.order, rows.sight.back
        assert order is not None
        assert back is not None
        assert order[back].tolist() == list(range(66))
        token_rows = np.repeat(np.arange(len(rows.query_lens)), rows.query_lens)
        assert rows.sequences[token_rows].tolist() == sequences[order].tolist()
        offsets = np.arange(66) - (np.cumsum(rows.query_lens) - rows.query_lens)[token_rows]
        seen = (rows.num_keys - rows.query_lens)[token_rows] + offsets + 1
        assert (seen >= 1).all()
        seen[rows.sight.sees_none.numpy()] = 0
        expected = [sum(shard.owner(np.arange(at + 1)) == rank) for at in positions[order]]
        assert seen.tolist() == expected
        num_rows.append(len(rows.query_lens))
    # A row for each prompt and rank, and more where a rank has no key of a prompt's first tokens. With longer turns,
    # those of the 66 tokens attend one by one that are at positions of others.
    assert max(num_rows) <= (3 * size + 1 + 2 * (size - 1) if run == 1 else 40)


def build_batch(query_lens: np.ndarray, seq_lens: np.ndarray) -> InputBatch:
    """A step's rows; of the rest of it, nothing is read."""
    no_ids, no_slots = torch.empty(0), np.empty(0)
    return InputBatch(no_ids, no_ids, [], query_lens, seq_lens, query_lens, no_ids, no_slots, no_slots)


def groups_of(layout: Layout) -> list[dict[int, ThreadGroup]]:
    """By a worker's number, the threads that divide weights with it, and those that divide positions."""
    firsts = range(0, layout.num_workers, layout.tensor)
    return [
        made(division) for division in ([list(range(n, n + layout.tensor)) for n in firsts], _context_groups(layout))
    ]


def made(divisions: list[list[int]]) -> dict[int, ThreadGroup]:
    """Groups of threads, by the numbers of their members."""
    groups = {}
    for numbers in divisions:
        box: list[Any] = [None] * len(numbers)
        barrier = threading.Barrier(len(numbers))
        groups |= {number: ThreadGroup(at, len(numbers), box, barrier) for at, number in enumerate(numbers)}
    return groups


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
    return [
        *mixed_requests(),
        request("scored", prompt_of(50, 60), prompt_logprobs=2),
        embedded("embedded", rows_of(7, 75)),
    ]


def scores_of(deltas: list[RequestDelta]) -> dict[int, list[float]]:
    parts = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None]
    return {part.start + number: entry.logprobs for part in parts for number, entry in enumerate(part.positions)}


def run_on_ranks(folder: Path, layout: Layout, run: int, cache: CacheConfig) -> list[RankRun]:
    """Runs all ranks of a layout without stages."""
    size, part = layout.num_workers, layout.sequence
    tensor, context = groups_of(layout)
    config = engine_config(
        folder,
        limits=msgspec.structs.replace(LIMITS, block_size=BLOCK_SIZE * part),
        cache=cache,
        layout=layout,
        cp_kv_cache_interleave_size=run,
    )

    def on_rank(rank: int) -> RankRun:
        try:
            worker = Worker(config, layout.ranks()[rank], tensor[rank], context_group=context[rank])
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
                group._barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(on_rank, range(size)))


@functools.cache
def _run_whole(folder: Path, num_pages: int, dtype: KVCacheDtype) -> RankRun:
    cache = CacheConfig(num_gpu_blocks_override=num_pages, kv_cache_dtype=dtype)
    [whole] = run_on_ranks(folder, Layout(), 1, cache)
    return whole


def run_whole(folder: Path, cache: CacheConfig) -> RankRun:
    """What one worker does alone, once for all cases with this model and cache."""
    assert cache.num_gpu_blocks_override is not None
    return _run_whole(folder, cache.num_gpu_blocks_override, cache.kv_cache_dtype)


ROOM, LITTLE_ROOM = CacheConfig(num_gpu_blocks_override=400), CacheConfig(num_gpu_blocks_override=100)
CASES: dict[str, tuple[int, Layout, int, CacheConfig]] = {
    "decode-one-kv-head": (1, Layout(tensor=2, context=2), 1, ROOM),
    "decode-runs-of-a-page": (1, Layout(tensor=4, context=4), 4, ROOM),
    "decode-two-kv-heads": (2, Layout(tensor=4, context=2), 2, ROOM),
    "decode-codes": (1, Layout(tensor=2, context=2), 1, msgspec.structs.replace(ROOM, kv_cache_dtype="fp8")),
    "decode-preempted": (1, Layout(tensor=2, context=2), 2, LITTLE_ROOM),
    "prefill": (2, Layout(prefill=2), 1, ROOM),
    "prefill-runs": (2, Layout(prefill=3), 2, ROOM),
    "prefill-tensor": (2, Layout(prefill=2, tensor=2), 1, ROOM),
    "prefill-codes-preempted": (1, Layout(prefill=2), 4, msgspec.structs.replace(LITTLE_ROOM, kv_cache_dtype="fp8")),
}
"""KV heads, layout, neighbouring positions of a rank, and cache."""


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_one_worker(case: str, checkpoint: Checkpoints) -> None:
    num_kv_heads, layout, run, cache = CASES[case]
    folder = checkpoint("qwen3", head_dim=16, num_key_value_heads=num_kv_heads)
    whole = run_whole(folder, cache)
    for rank in run_on_ranks(folder, layout, run, cache):
        assert rank.tokens == whole.tokens
        # Heads and positions together: the whole cache, divided by the number of ranks.
        assert rank.page_bytes * layout.num_workers == whole.page_bytes * layout.sequence
        assert 1 <= rank.share * layout.prefill < 1.4
        assert list(rank.scores) == list(whole.scores) == list(range(1, 60))
        for position, logprobs in whole.scores.items():
            assert rank.scores[position] == pytest.approx(logprobs, abs=1e-3)


FORMS: dict[str, tuple[Any, dict[str, Any], Layout, int]] = {
    "windows": ("gemma3", {"sliding_window": 8, "num_hidden_layers": 6}, Layout(tensor=2, context=2), 4),
    "windows-prefill": ("gemma3", {"sliding_window": 8, "num_hidden_layers": 6}, Layout(prefill=2), 1),
    "sinks": ("gpt_oss", {"sliding_window": 12, "num_key_value_heads": 2}, Layout(tensor=4, context=2), 2),
    "sinks-prefill": ("gpt_oss", {"sliding_window": 12}, Layout(prefill=3), 2),
    "chunks": ("llama4", {"attention_chunk_size": 8, "num_hidden_layers": 4}, Layout(tensor=2, context=2), 1),
    "chunks-prefill": ("llama4", {"attention_chunk_size": 8, "num_hidden_layers": 4}, Layout(prefill=2), 4),
    "alibi": ("falcon", {"alibi": True, "multi_query": True, "seed": 2}, Layout(tensor=2, context=2), 1),
    "alibi-prefill": ("falcon", {"alibi": True, "multi_query": True, "seed": 2}, Layout(prefill=2), 1),
}
"""Family, options, layout, and neighbouring positions of a rank."""


@pytest.mark.parametrize("case", FORMS)
def test_attention_that_knows_where_keys_lie(case: str, checkpoint: Checkpoints) -> None:
    family, options, layout, run = FORMS[case]
    folder = checkpoint(family, **{"num_key_value_heads": 1, **options})
    whole = run_whole(folder, ROOM)
    for rank in run_on_ranks(folder, layout, run, ROOM):
        assert rank.tokens == whole.tokens
        assert rank.page_bytes * layout.num_workers == whole.page_bytes * layout.sequence
        for position, logprobs in whole.scores.items():
            assert rank.scores[position] == pytest.approx(logprobs, abs=1e-3)


def test_models_with_states(hybrid: Folder) -> None:  # noqa: F811
    folder, cache = hybrid("nemotron-h"), CacheConfig(num_gpu_blocks_override=600)
    [whole] = run_on_ranks(folder, Layout(), 1, cache)
    for rank in run_on_ranks(folder, Layout(tensor=4, context=2), 1, cache):
        assert rank.tokens == whole.tokens


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("qwen3", {"num_key_value_heads": 2}, "puts each of 2 KV heads on 1; choose 1"),
        (
            "mistral",
            {"sliding_window": 10, "num_key_value_heads": 1},
            "turns of 4 do not divide .* chunks of 10 tokens",
        ),
        ("falcon", {"alibi": True, "multi_query": True}, "needs --cp-kv-cache-interleave-size 1 for this model"),
        ("deepseek_v3", {}, "decode-context-parallel-size is not there for latent attention"),
        ("transformers", {"num_key_value_heads": 1}, "not there for classes of Transformers"),
    ],
)
def test_models_that_cannot_divide_positions_are_refused(
    family: Any, options: dict[str, Any], message: str, checkpoint: Checkpoints
) -> None:
    is_foreign = family == "transformers"
    config = engine_config(
        checkpoint("qwen3" if is_foreign else family, **options),
        layout=Layout(tensor=2, context=2),
        cp_kv_cache_interleave_size=2,
    )
    if is_foreign:
        spec = msgspec.structs.replace(config.spec, implementation="transformers")
        config = msgspec.structs.replace(config, spec=spec)
    with pytest.raises(ModelLoadError, match=message):
        Worker(config, Rank(), ParallelGroup(0, 2)).load()


def test_states_need_all_tokens(hybrid: Folder) -> None:  # noqa: F811
    config = engine_config(hybrid("nemotron-h"), layout=Layout(prefill=2))
    with pytest.raises(ModelLoadError, match="prefill-context-parallel-size is not there for recurrent layers"):
        Worker(config, Rank(), ParallelGroup()).load()


def test_workers_are_processes(checkpoint: Checkpoints) -> None:
    """Positions are divided over the workers of each of two stages: with whole experts, and with tokens."""
    folder = checkpoint("qwen3_moe", num_key_value_heads=1, num_hidden_layers=4)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [list(range(5, 5 + length)) for length in (3, 50)]
    whole = generate(
        start_worker(engine_config(folder)),
        [request(str(len(prompt)), prompt, max_tokens=12) for prompt in prompts],
        kv_groups=[KVGroupSpec("full", list(range(4)), page_bytes=0)],
    )
    division = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "decode_context_parallel_size": 2}
    tokens = {"pipeline_parallel_size": 2, "prefill_context_parallel_size": 2}
    for parallel in ({**division, "enable_expert_parallel": True}, tokens):
        with LLM(str(folder), max_model_len=128, max_num_seqs=4, num_gpu_blocks_override=40, **parallel) as llm:
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == list(tokens_of(whole).values())
