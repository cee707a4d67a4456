"""Sequences whose positions several ranks divide, against one worker."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from quire.core.config.cache import CacheConfig
from quire.core.wire.rank import Layout
from quire.executor.parallel.context.divided import DividedContext
from quire.executor.parallel.context.rows import PartialRows
from quire.executor.parallel.context.shard import SequenceShard
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.step.input_batch import InputBatch
from tests.executor.models.test_hybrid_models import folder as hybrid  # noqa: F401
from tests.executor.paged_driver import Checkpoints
from tests.executor.step.sequence_ranks import BOTH, LITTLE_ROOM, ROOM, run_on_ranks, run_whole

torch.set_num_threads(1)


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
        order, back = rows.shard_view.order, rows.shard_view.back
        assert order is not None
        assert back is not None
        assert order[back].tolist() == list(range(66))
        token_rows = np.repeat(np.arange(len(rows.query_lens)), rows.query_lens)
        assert rows.sequences[token_rows].tolist() == sequences[order].tolist()
        offsets = np.arange(66) - (np.cumsum(rows.query_lens) - rows.query_lens)[token_rows]
        seen = (rows.num_keys - rows.query_lens)[token_rows] + offsets + 1
        assert (seen >= 1).all()
        seen[rows.shard_view.sees_none.numpy()] = 0
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
    "both": (1, BOTH, 1, ROOM),
    "both-runs-preempted": (2, Layout(prefill=3, tensor=4, context=2), 2, LITTLE_ROOM),
}
"""KV heads, layout, neighbouring positions of a rank, and cache."""


@pytest.mark.turns(4)
@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_one_worker(case: str, checkpoint: Checkpoints) -> None:
    num_kv_heads, layout, run, cache = CASES[case]
    folder = checkpoint("qwen3", head_dim=16, num_key_value_heads=num_kv_heads)
    whole = run_whole(folder, cache)
    # Ranks add in another order. In few bits a last digit may make another code of a number: of one request here.
    most_other = 1 if cache.kv_cache_dtype == "fp8" else 0
    for rank in run_on_ranks(folder, layout, run, cache):
        assert rank.tokens.keys() == whole.tokens.keys()
        assert sum(rank.tokens[name] != tokens for name, tokens in whole.tokens.items()) <= most_other
        # Heads and positions together: the whole cache, divided by the number of ranks.
        assert rank.page_bytes * layout.num_workers == whole.page_bytes * layout.sequence
        assert 1 <= rank.share * layout.prefill < 1.4
        assert list(rank.scores) == list(whole.scores) == list(range(1, 60))
        for position, logprobs in whole.scores.items():
            assert rank.scores[position] == pytest.approx(logprobs, abs=1e-3)


FORMS: dict[str, tuple[Any, dict[str, Any], Layout, int]] = {
    "windows": ("gemma3", {"sliding_window": 8, "num_hidden_layers": 6}, Layout(tensor=2, context=2), 4),
    "windows-both": ("gemma3", {"sliding_window": 8, "num_hidden_layers": 6}, BOTH, 2),
    "windows-prefill": ("gemma3", {"sliding_window": 8, "num_hidden_layers": 6}, Layout(prefill=2), 1),
    "sinks": ("gpt_oss", {"sliding_window": 12, "num_key_value_heads": 2}, Layout(tensor=4, context=2), 2),
    "sinks-prefill": ("gpt_oss", {"sliding_window": 12}, Layout(prefill=3), 2),
    "chunks": ("llama4", {"attention_chunk_size": 8, "num_hidden_layers": 4}, Layout(tensor=2, context=2), 1),
    "chunks-prefill": ("llama4", {"attention_chunk_size": 8, "num_hidden_layers": 4}, Layout(prefill=2), 4),
    "alibi": ("falcon", {"alibi": True, "multi_query": True, "seed": 2}, Layout(tensor=2, context=2), 1),
    "alibi-both": ("falcon", {"alibi": True, "multi_query": True, "seed": 2}, BOTH, 1),
    "sinks-both": ("gpt_oss", {"sliding_window": 12}, Layout(prefill=3, tensor=2, context=2), 2),
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


def test_what_ranks_exchange_is_planned() -> None:
    """Queries of all that compute the same tokens, or blocks of a part of a step's tokens, and the results."""
    sizes = [
        DividedContext(ParallelGroup(0, size), num_parts, 1).activation_size(4, 36, 24)
        for size, num_parts in ((2, 1), (2, 2), (6, 3))
    ]
    assert sizes == [2 * 4 * 108, 4 * (72 + 24), 4 * (48 + 48)]


NUM_PASSED = 1500
"""Tokens of which a rank has more queries than are gathered (`GATHERED_BYTES`), so that blocks travel."""

PROCESSES: dict[str, dict[str, Any]] = {
    "decode-stages-experts": {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "decode_context_parallel_size": 2,
        "enable_expert_parallel": True,
    },
    "prefill-stages": {"pipeline_parallel_size": 2, "prefill_context_parallel_size": 2},
    "both": {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "prefill_context_parallel_size": 2},
}


@pytest.fixture(scope="module")
def of_one_worker(checkpoint: Checkpoints) -> tuple[Path, list[list[int]]]:
    """A model, and what one worker generates with it."""
    folder = checkpoint("qwen3_moe", num_key_value_heads=1, num_hidden_layers=4, head_dim=64)
    return folder, generated(folder)


def generated(folder: Path, **options: Any) -> list[list[int]]:
    """Tokens after prompts of several lengths."""
    limits: dict[str, Any] = {"max_model_len": 2048, "max_num_seqs": 4, "num_gpu_blocks_override": 200}
    prompts = [{"prompt_token_ids": [5 + at % 60 for at in range(length)]} for length in (3, 50, NUM_PASSED)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(str(folder), **limits, **options) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize("case", PROCESSES)
def test_workers_are_processes(case: str, of_one_worker: tuple[Path, list[list[int]]]) -> None:
    folder, expected = of_one_worker
    assert generated(folder, **PROCESSES[case]) == expected
