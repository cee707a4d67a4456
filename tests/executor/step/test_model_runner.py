"""A real worker on a tiny checkpoint, driven by the real scheduler: tokens against transformers' own."""

import shutil
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quire.core.config.cache import CacheConfig
from quire.core.config.load import LoadConfig
from quire.core.config.model import ModelConfig
from quire.core.config.resolved import EngineConfig, SchedulerLimits
from quire.core.errors import ModelLoadError
from quire.core.scheduling.scheduler import Scheduler
from quire.core.wire.kv_groups import KVGroupSpec
from quire.core.wire.protocol import (
    EngineRequest,
    FinishReason,
    NewSlot,
    RequestDelta,
    SequenceStart,
    StepPlan,
    StepResult,
)
from quire.core.wire.rank import Layout, Rank
from quire.core.wire.row_outputs import OutputKind
from quire.core.wire.sampling_params import SamplingParams
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.worker import Worker
from quire.frontend.checkpoint.model_spec import read_model_spec
from tests.checkpoints import VOCAB_SIZE
from tests.core.scheduling.fake_worker import resumed_after, start_of

LIMITS = SchedulerLimits(max_num_seqs=32, max_num_batched_tokens=512, block_size=16)
NUM_BLOCKS = 600
MAX_MODEL_LEN = 256


def engine_config(folder: Path, **changes: Any) -> EngineConfig:
    options = {
        "spec": read_model_spec(folder, ModelConfig(model=str(folder))),
        "limits": LIMITS,
        "load": LoadConfig(),
        "cache": CacheConfig(num_gpu_blocks_override=NUM_BLOCKS),
        "device": "cpu",
        "layout": Layout(),
        "executor": "uni",
        "max_model_len": MAX_MODEL_LEN,
        "fit_max_model_len": False,
        "seed": 0,
    }
    return EngineConfig(**{**options, **changes})


def start_worker(config: EngineConfig) -> Worker:
    worker = Worker(config, Rank(), ParallelGroup())
    ready = worker.load()
    worker.allocate(ready.num_pages, ready.max_model_len)
    return worker


def execute(worker: Worker, plan: StepPlan) -> StepResult:
    return worker.collect(worker.launch(plan))


def generate(
    worker: Worker,
    requests: list[EngineRequest],
    *,
    depth: int = 2,
    num_pages: int = NUM_BLOCKS,
    kv_groups: Sequence[KVGroupSpec] = (KVGroupSpec("full", [0, 1], page_bytes=0),),
    num_stages: int = 1,
    max_model_len: int = MAX_MODEL_LEN,
    num_token_types: int = 1,
    whole_prompts: bool = False,
    **limits: Any,
) -> dict[str, list[RequestDelta]]:
    """Runs requests to their ends with `depth` plans made ahead; deltas by request id."""
    scheduler = Scheduler(
        replace(LIMITS, **limits),
        kv_groups=kv_groups,
        num_pages=num_pages,
        max_model_len=max_model_len,
        eos_token_ids=[2],
        num_stages=num_stages,
        num_token_types=num_token_types,
        whole_prompts=whole_prompts,
    )
    for request in requests:
        assert scheduler.add(request) == []
    deltas: dict[str, list[RequestDelta]] = {start.request_id: [] for each in requests for start in each.sequences}
    plans: deque[StepPlan] = deque()
    while scheduler.has_unfinished():
        while len(plans) < depth and (plan := scheduler.schedule()) is not None:
            plans.append(plan)
        for delta in scheduler.update(execute(worker, plans.popleft())):
            deltas[delta.request_id].append(delta)
    scheduler.check_invariants()
    return deltas


def tokens_of(deltas: dict[str, list[RequestDelta]]) -> dict[str, list[int]]:
    return {name: [token for delta in entries for token in delta.token_ids] for name, entries in deltas.items()}


def prompt_of(number: int, length: int) -> list[int]:
    return [(number * 31 + 17 * i * i + i) % (VOCAB_SIZE - 3) + 3 for i in range(length)]


def request(name: str, prompt: list[int], *, seed: int = 0, **sampling: Any) -> EngineRequest:
    options = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **sampling}
    return EngineRequest([SequenceStart(name, seed)], prompt, SamplingParams(**options))


def mixed_requests() -> list[EngineRequest]:
    """Greedy and seeded rows of many lengths, features mixed, some with a common beginning."""
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9, "seed": 3},
        {"temperature": 1.3, "top_p": 0.9, "top_k": 50, "seed": -8, "logprobs": 2},
        {"presence_penalty": 0.6, "repetition_penalty": 1.3},
        {"temperature": 0.7, "min_p": 0.05, "frequency_penalty": 0.3, "seed": 5},
        {"min_tokens": 10, "ignore_eos": False, "temperature": 0.8, "seed": 1},
    ]
    shared = prompt_of(99, 40)
    return [
        request(
            f"r{i}", (shared if i % 3 == 0 else []) + prompt_of(i, 1 + 5 * i % 70), **kinds[i % len(kinds)]
        )
        for i in range(24)
    ]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama")


@pytest.fixture(scope="module")
def worker(folder: Path) -> Worker:
    return start_worker(engine_config(folder))


@pytest.fixture(scope="module")
def expected(worker: Worker) -> dict[str, list[int]]:
    """Each request on its own, one step at a time, prompts whole, no prefix cache."""
    tokens: dict[str, list[int]] = {}
    for one in mixed_requests():
        tokens |= tokens_of(generate(worker, [one], depth=1, enable_prefix_caching=False))
    assert len({tuple(row) for row in tokens.values()}) == len(tokens), "outputs must differ to prove anything"
    return tokens


def test_greedy_tokens_are_transformers(worker: Worker, folder: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = [prompt_of(i, length) for i, length in enumerate([1, 16, 75])]
    got = tokens_of(generate(worker, [request(str(i), p, max_tokens=64) for i, p in enumerate(prompts)]))
    for i, prompt in enumerate(prompts):
        output = reference.generate(
            torch.tensor([prompt]), max_new_tokens=64, min_new_tokens=64, do_sample=False, eos_token_id=None
        )
        assert got[str(i)] == output[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    "options",
    [
        {"depth": 1},
        {"depth": 2},
        {"depth": 3},
        {"max_num_batched_tokens": 16},
        {"max_num_seqs": 5, "long_prefill_token_threshold": 7},
        {"num_pages": 24, "depth": 1},
        {"num_pages": 24, "depth": 3, "max_num_batched_tokens": 40},
        {"enable_prefix_caching": False},
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_company_chunks_cache_or_preemption(
    worker: Worker, expected: dict[str, list[int]], options: dict[str, Any]
) -> None:
    assert tokens_of(generate(worker, mixed_requests(), **options)) == expected


def test_the_small_pool_above_did_preempt(worker: Worker) -> None:
    deltas = generate(worker, mixed_requests(), num_pages=24)
    assert any(delta.num_preemptions for entries in deltas.values() for delta in entries)


def test_a_request_resumes_after_the_tokens_already_delivered(worker: Worker, expected: dict[str, list[int]]) -> None:
    """As after a crash: the frontend sends the delivered tokens, and the remaining ones are the same."""
    requests = {start_of(one).request_id: one for one in mixed_requests()}
    resumed = {name: tokens for name, tokens in expected.items() if len(tokens) > 8}
    rest = tokens_of(generate(worker, [resumed_after(tokens[:7], requests[name]) for name, tokens in resumed.items()]))
    assert rest == {name: tokens[7:] for name, tokens in resumed.items()}


def test_logprobs_are_transformers(worker: Worker, folder: Path) -> None:
    prompt = prompt_of(1, 20)
    deltas = generate(worker, [request("a", prompt, max_tokens=8, logprobs=4, temperature=0.7, seed=2)])["a"]
    tokens = [token for delta in deltas for token in delta.token_ids]
    entries = [entry for delta in deltas for entry in delta.logprobs or []]
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    raw = logits.log_softmax(-1)
    assert len(entries) == len(tokens) == 8
    for position, (token, entry) in enumerate(zip(tokens, entries, strict=True)):
        assert entry.token_ids[0] == token
        assert entry.token_ids[1:] == raw[position].topk(4).indices.tolist()
        np.testing.assert_allclose(entry.logprobs, raw[position, entry.token_ids], atol=1e-4)
        assert entry.nth_likeliest == int((raw[position] > raw[position, token]).sum()) + 1


def test_a_row_with_nan_fails_alone(folder: Path, tmp_path: Path) -> None:
    """One token's embedding is NaN: the request that holds it fails, and the next owner of its pages is not harmed."""
    broken = Path(shutil.copytree(folder, tmp_path / "broken"))
    weights = load_file(broken / "model.safetensors")
    weights["model.embed_tokens.weight"][300] = torch.nan
    save_file(weights, broken / "model.safetensors")
    worker = start_worker(engine_config(broken))
    good, poison = prompt_of(1, 30), [*prompt_of(2, 30), 300]
    before = tokens_of(generate(worker, [request("good", good)]))["good"]
    assert 300 not in good + before
    deltas = generate(worker, [request("good", good), request("poison", poison)])
    last = deltas["poison"][-1]
    assert last.finish_reason == FinishReason.ERROR
    assert last.failure is not None
    assert "NaN" in last.failure.message
    assert tokens_of(deltas)["good"] == before
    again = generate(worker, [request("good", good)], num_pages=4)
    assert tokens_of(again)["good"] == before


def test_a_plan_without_samples_returns_nothing(worker: Worker) -> None:
    new = NewSlot(0, prompt_of(0, 10), 10, [[0]], SamplingParams(seed=0))
    result = execute(worker, StepPlan(5, [], [new], [0], [0], [4], [0], []))
    assert (result.step_id, result.token_ids) == (5, [])


def test_a_released_request_costs_later_steps_nothing(folder: Path, tmp_path: Path) -> None:
    """The request was released before its prompt was scored, and no other request has its slot."""
    worker = start_worker(engine_config(folder, trace_folder=str(tmp_path)))
    scored = NewSlot(0, prompt_of(0, 10), 10, [[0]], SamplingParams(seed=0, prompt_logprobs=1))
    plain = NewSlot(1, prompt_of(1, 10), 10, [[1]], SamplingParams(seed=0))
    wanted = [(0, OutputKind.PROMPT_LOGPROBS)]
    first = StepPlan(0, [], [scored, plain], [0, 1], [0, 0], [4, 4], [0, 0], [], outputs=wanted)
    spans = execute(worker, first).spans
    assert "score" in {name for name, _, _ in spans}
    spans = execute(worker, StepPlan(1, [0], [], [1], [4], [6], [1], [])).spans
    assert "score" not in {name for name, _, _ in spans}


def test_memory_is_planned_from_the_checkpoint(folder: Path) -> None:
    config = engine_config(folder, cache=CacheConfig(kv_cache_memory_bytes=10_000_000))
    ready = Worker(config, Rank(), ParallelGroup()).load()
    page_bytes = 2 * 2 * 16 * 2 * 16 * 4  # layers, keys and values, tokens, heads, head size, float32
    assert ready.num_pages == 10_000_000 // page_bytes
    assert ready.kv_cache_bytes == ready.num_pages * page_bytes
    assert ready.max_model_len == MAX_MODEL_LEN
    assert ready.weights_bytes == pytest.approx((folder / "model.safetensors").stat().st_size, rel=0.05)
    with pytest.raises(ModelLoadError, match=r"--max-model-len 112 "):
        Worker(
            engine_config(folder, cache=CacheConfig(kv_cache_memory_bytes=7 * page_bytes)), Rank(), ParallelGroup()
        ).load()
    auto = engine_config(folder, cache=CacheConfig(kv_cache_memory_bytes=7 * page_bytes), fit_max_model_len=True)
    assert Worker(auto, Rank(), ParallelGroup()).load().max_model_len == 112


def test_int8_weights_are_smaller_and_leave_tokens_to_the_batch(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("llama", hidden_size=128, intermediate_size=256)
    plain, small = (Worker(engine_config(folder, quantization=q), Rank(), ParallelGroup()) for q in (None, "int8"))
    assert small.load().weights_bytes < 0.5 * plain.load().weights_bytes
    rows = [request(str(i), prompt_of(i, 20)) for i in range(5)]
    small.allocate(NUM_BLOCKS, MAX_MODEL_LEN)
    together = tokens_of(generate(small, rows))
    for name, row in enumerate(rows):
        assert tokens_of(generate(small, [row])) == {str(name): together[str(name)]}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs_on_the_cpu(checkpoint: Callable[..., Path], dtype: str) -> None:
    worker = start_worker(engine_config(checkpoint("qwen3", dtype=dtype)))
    tokens = tokens_of(generate(worker, [request(str(i), prompt_of(i, 20)) for i in range(3)]))
    assert all(len(row) == 24 for row in tokens.values())


def test_dummy_weights_need_no_files(checkpoint: Callable[..., Path]) -> None:
    config = engine_config(checkpoint("llama"), load=LoadConfig(load_format="dummy"))
    first, second = (tokens_of(generate(start_worker(config), [request("a", [5, 6])])) for _ in range(2))
    assert first == second


def test_cuda_without_a_device_is_refused(folder: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    with pytest.raises(ModelLoadError, match="--device cpu"):
        Worker(engine_config(folder, device="cuda"), Rank(), ParallelGroup())
