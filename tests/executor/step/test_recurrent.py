"""Models with recurrent layers in a real worker, driven by the real scheduler: states in slots, snapshots in pages."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from quire import LLM, SamplingParams
from quire.core.config.cache import CacheConfig
from quire.core.errors import ModelLoadError
from quire.core.wire.protocol import EngineRequest, RequestDelta, WorkerReady
from quire.core.wire.rank import Rank
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.worker import Worker
from quire.ops.eager.backend import EagerBackend
from quire.ops.eager.linear import PlainLinear
from tests.core.scheduling.fake_worker import resumed_after, start_of
from tests.executor.models.test_hybrid_models import folder as hybrid  # noqa: F401
from tests.executor.step.test_drafts import ToldDrafter
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

BLOCK_SIZE, INTERVAL = 4, 16


class Served(NamedTuple):
    folder: Path
    worker: Worker
    ready: WorkerReady
    generate: Callable[..., dict[str, list[RequestDelta]]]


def start(folder: Path, *, caching: bool = True, **options: Any) -> tuple[Worker, WorkerReady]:
    config = engine_config(
        folder,
        limits=msgspec.structs.replace(LIMITS, block_size=BLOCK_SIZE, enable_prefix_caching=caching),
        cache=CacheConfig(num_gpu_blocks_override=600, mamba_block_size=INTERVAL if caching else None),
    )
    worker = Worker(config, Rank(), ParallelGroup(), **options)
    ready = worker.load()
    worker.allocate(ready.num_pages, ready.max_model_len)
    return worker, ready


@pytest.fixture(scope="module", params=["lfm2", "mamba2", "qwen3.5"])
def served(request: pytest.FixtureRequest, hybrid: Callable[[str], Path]) -> Served:  # noqa: F811
    folder = hybrid(request.param)
    worker, ready = start(folder)
    run = partial(generate, worker, block_size=BLOCK_SIZE, kv_groups=ready.kv_groups)
    return Served(folder, worker, ready, run)


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
        {"enable_chunked_prefill": False},
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_company_or_chunks(
    served: Served, expected: dict[str, list[int]], options: dict[str, Any]
) -> None:
    assert tokens_of(served.generate(mixed_requests(), **options)) == expected


def test_a_request_continues_from_a_snapshot_with_the_same_tokens(served: Served) -> None:
    """Of the prompt's last whole interval, and of an output that no prompt ever had."""
    shared = prompt_of(7, 100)

    def conversation(answer: list[int]) -> list[EngineRequest]:
        turns = [shared, [*shared, 5, 6, 7], [*shared, *answer, 9]]
        return [request(name, turn, max_tokens=40) for name, turn in zip("abc", turns, strict=True)]

    [alone] = tokens_of(served.generate(conversation([])[:1], enable_prefix_caching=False)).values()
    apart: dict[str, list[int]] = {}
    for one in conversation(alone):
        apart |= tokens_of(served.generate([one], enable_prefix_caching=False))
    deltas = served.generate(conversation(alone), max_num_seqs=1)
    assert tokens_of(deltas) == apart
    assert [deltas[name][0].num_cached_tokens for name in "abc"] == [0, 96, 128]


def test_tokens_do_not_depend_on_preemption_and_evicted_snapshots(served: Served) -> None:
    """Short prompts are admitted together, and their outputs grow until the pool is too small."""
    growing = [request(str(i), prompt_of(i, 3), max_tokens=100, temperature=0.8, seed=i) for i in range(8)]
    alone: dict[str, list[int]] = {}
    for one in growing:
        alone |= tokens_of(served.generate([one], enable_prefix_caching=False))
    pages = sum(group.max_pages(104, block_size=BLOCK_SIZE, largest_chunk=32) for group in served.ready.kv_groups)
    deltas = served.generate(growing, num_pages=pages + 7, max_num_batched_tokens=32)
    assert tokens_of(deltas) == alone
    if pages:  # a model of states alone runs as many requests as there are slots
        assert any(delta.num_preemptions for entries in deltas.values() for delta in entries)


def test_a_request_resumes_after_the_tokens_already_delivered(served: Served, expected: dict[str, list[int]]) -> None:
    requests = {start_of(one).request_id: one for one in mixed_requests()}
    resumed = {name: tokens for name, tokens in expected.items() if len(tokens) > 8}
    rest = tokens_of(served.generate([resumed_after(tokens[:7], requests[name]) for name, tokens in resumed.items()]))
    assert rest == {name: tokens[7:] for name, tokens in resumed.items()}


def test_pages_that_held_states_do_not_spoil_attention(
    hybrid: Callable[[str], Path],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A state's bytes, read as keys, may be NaN, and attention in plain torch multiplies what it masks by 0."""
    monkeypatch.setattr("quire.ops.bind", lambda device: EagerBackend(PlainLinear()))
    tokens = []
    for content in (0, 0xFF):  # zeros, and NaN in every type
        worker, ready = start(hybrid("lfm2"))
        snapshots = worker._runner._snapshots  # type: ignore[union-attr]
        assert snapshots is not None
        for tensor in snapshots._pages:
            tensor.fill_(content)
        snapshots._is_snapshot[:] = True
        deltas = generate(worker, mixed_requests(), block_size=BLOCK_SIZE, kv_groups=ready.kv_groups)
        tokens.append(tokens_of(deltas))
    assert tokens[0] == tokens[1]


def test_without_the_prefix_cache_a_model_of_states_alone_has_no_pages(hybrid: Callable[[str], Path]) -> None:  # noqa: F811
    worker, ready = start(hybrid("mamba2"), caching=False)
    [group] = ready.kv_groups
    assert group.snapshot_pages == 0
    one = [request("a", prompt_of(1, 20))]
    tokens = tokens_of(generate(worker, one, kv_groups=ready.kv_groups, block_size=BLOCK_SIZE, num_pages=0))
    assert len(tokens["a"]) == 24


def test_drafts_and_states_exclude_each_other(hybrid: Callable[[str], Path]) -> None:  # noqa: F811
    with pytest.raises(ModelLoadError, match=r"recurrent layers.* serve it without drafts"):
        start(hybrid("lfm2"), drafter=ToldDrafter({}))


@pytest.mark.parametrize("variant", ["lfm2", "mamba2"])
def test_two_workers_find_snapshots_and_give_the_same_tokens(variant: str, hybrid: Callable[[str], Path]) -> None:  # noqa: F811
    shared = prompt_of(7, 100)
    prompts: list[Any] = [{"prompt_token_ids": [*shared, *prompt_of(i, 5 + i)]} for i in range(4)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    got = []
    for size in (1, 2):
        options = {"max_model_len": 256, "max_num_seqs": 4, "kv_cache_memory_bytes": 1 << 22, "mamba_block_size": 16}
        options |= {"skip_tokenizer_init": True}
        with LLM(str(hybrid(variant)), tensor_parallel_size=size, **options) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            again = llm.generate(prompts, params, use_tqdm=False)
        assert [output.num_cached_tokens for output in outputs] == [0, 96, 96, 96]
        assert [output.num_cached_tokens for output in again] == [96, 96, 96, 96]
        got += [[output.outputs[0].token_ids for output in each] for each in (outputs, again)]
    assert got[1:] == [got[0]] * 3
