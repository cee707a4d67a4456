"""Sequences whose positions several ranks divide, against one worker: real workers, driven by the real scheduler."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from quire.core.config.cache import CacheConfig
from quire.core.errors import ModelLoadError
from quire.core.wire.rank import Layout, Rank
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.parallel.sequence_shard import SequenceShard
from quire.executor.step.input_batch import InputBatch
from quire.executor.step.partial_rows import PartialRows
from quire.executor.worker import Worker
from tests.executor.layers.test_layers import ThreadGroup
from tests.executor.models.test_hybrid_models import Folder
from tests.executor.models.test_hybrid_models import folder as hybrid  # noqa: F401
from tests.executor.paged_driver import Checkpoints
from tests.executor.step.test_model_runner import LIMITS, engine_config, generate, mixed_requests, tokens_of

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


def groups_of(size: int, part: int) -> list[ThreadGroup]:
    """Groups of `part` neighbours each, of `size` threads."""
    boxes = [([None] * part, threading.Barrier(part)) for _ in range(size // part)]
    return [ThreadGroup(rank % part, part, *boxes[rank // part]) for rank in range(size)]


def run_on_ranks(
    folder: Path, size: int, part: int, run: int, cache: CacheConfig
) -> list[tuple[dict[str, list[int]], int]]:
    """What each of `size` ranks, `part` of which divide positions, generates, and the bytes of a token's pages."""
    tensor, context = groups_of(size, size), groups_of(size, part)
    config = engine_config(
        folder,
        limits=msgspec.structs.replace(LIMITS, block_size=BLOCK_SIZE * part),
        cache=cache,
        layout=Layout(tensor=size, context=part),
        cp_kv_cache_interleave_size=run,
    )

    def on_rank(rank: int) -> tuple[dict[str, list[int]], int]:
        try:
            worker = Worker(config, Rank(tensor=rank), tensor[rank], context_group=context[rank])
            ready = worker.load()
            worker.allocate(ready.num_pages, ready.max_model_len)
            # In chunks, a few at once, so that later ones find beginnings of prompts in the prefix cache.
            deltas = generate(
                worker, mixed_requests(), num_pages=ready.num_pages, kv_groups=ready.kv_groups,
                block_size=BLOCK_SIZE * part, max_num_seqs=8, max_num_batched_tokens=48,
            )  # fmt: skip
            return tokens_of(deltas), ready.kv_groups[0].page_bytes // (BLOCK_SIZE * part)
        except BaseException:
            for group in (tensor[rank], context[rank]):
                group._barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(on_rank, range(size)))


CASES: dict[str, tuple[dict[str, Any], int, int, int, CacheConfig]] = {
    "one-kv-head": ({"num_key_value_heads": 1}, 2, 2, 1, CacheConfig(num_gpu_blocks_override=400)),
    "runs-of-a-page": ({"num_key_value_heads": 1}, 4, 4, 4, CacheConfig(num_gpu_blocks_override=400)),
    "two-kv-heads": ({"num_key_value_heads": 2}, 4, 2, 2, CacheConfig(num_gpu_blocks_override=400)),
    "codes": (
        {"num_key_value_heads": 1}, 2, 2, 1, CacheConfig(num_gpu_blocks_override=400, kv_cache_dtype="fp8")
    ),
    "preempted": ({"num_key_value_heads": 1}, 2, 2, 2, CacheConfig(num_gpu_blocks_override=100)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_one_worker(case: str, checkpoint: Checkpoints) -> None:
    options, size, part, run, cache = CASES[case]
    folder = checkpoint("qwen3", head_dim=16, **options)
    [(expected, token_bytes)] = run_on_ranks(folder, 1, 1, 1, cache)
    for tokens, own_bytes in run_on_ranks(folder, size, part, run, cache):
        assert tokens == expected
        assert own_bytes * size == token_bytes  # heads and positions together


def test_models_with_states(hybrid: Folder) -> None:  # noqa: F811
    folder, cache = hybrid("nemotron-h"), CacheConfig(num_gpu_blocks_override=600)
    [(expected, _)] = run_on_ranks(folder, 1, 1, 1, cache)
    for tokens, _ in run_on_ranks(folder, 4, 2, 1, cache):
        assert tokens == expected


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("qwen3", {"num_key_value_heads": 2}, "puts each of 2 KV heads on 1; choose 1"),
        ("mistral", {"sliding_window": 12, "num_key_value_heads": 1}, "attention to all tokens alike"),
        ("deepseek_v3", {}, "not there for latent attention"),
        ("transformers", {"num_key_value_heads": 1}, "not there for classes of Transformers"),
    ],
)
def test_models_that_cannot_divide_positions_are_refused(
    family: Any, options: dict[str, Any], message: str, checkpoint: Checkpoints
) -> None:
    is_foreign = family == "transformers"
    config = engine_config(checkpoint("qwen3" if is_foreign else family, **options), layout=Layout(tensor=2, context=2))
    if is_foreign:
        spec = msgspec.structs.replace(config.spec, implementation="transformers")
        config = msgspec.structs.replace(config, spec=spec)
    with pytest.raises(ModelLoadError, match=message):
        Worker(config, Rank(), ParallelGroup(0, 2)).load()


def test_workers_are_processes(checkpoint: Checkpoints) -> None:
    """Positions and whole experts are divided over the workers of each of two stages."""
    folder = checkpoint("qwen3_moe", num_key_value_heads=1, num_hidden_layers=4)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [{"prompt_token_ids": list(range(5, 5 + length))} for length in (3, 50)]
    outputs = []
    division = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "decode_context_parallel_size": 2}
    for parallel in ({}, {**division, "enable_expert_parallel": True}):
        with LLM(str(folder), max_model_len=128, max_num_seqs=4, num_gpu_blocks_override=40, **parallel) as llm:
            outputs.append([output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)])
    assert outputs[0] == outputs[1]
