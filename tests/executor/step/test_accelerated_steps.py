"""A real worker on an accelerator that is not there: padded decode steps, recorded or not, have the CPU's tokens.

Its operations are plain torch, because kernels take too long in Triton's interpreter.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.core.config.cache import CacheConfig
from quire.core.wire.protocol import EngineRequest, RequestDelta, StepPlan
from quire.core.wire.rank import Rank
from quire.core.wire.row_outputs import TokenLogprobs
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.sampling.sampler import Sampler
from quire.executor.sampling.sampling_feature import SampleBatch
from quire.executor.step.drafts import Proposal
from quire.executor.worker import Worker
from quire.ops.backend import AttentionForm
from quire.ops.eager.backend import EagerBackend
from quire.ops.eager.linear import PlainLinear
from quire.ops.eager.sampling import EagerSampling
from quire.ops.sampling import new_tokens
from quire.ops.triton.backend import TritonBackend
from quire.ops.triton.graphs import RULES
from tests.executor.models.test_hybrid_models import folder as hybrid  # noqa: F401
from tests.executor.pretend_device import Launches, PretendDevice
from tests.executor.step.test_drafts import check_same, requests_of_all_kinds, told
from tests.executor.step.test_drafts import serve as serve_here
from tests.executor.step.test_model_runner import (
    NUM_BLOCKS,
    engine_config,
    generate,
    mixed_requests,
    prompt_of,
    request,
    start_worker,
    tokens_of,
)
from tests.executor.step.test_sameness import start as serve

pytestmark = pytest.mark.turns(4, among="whole systems")

torch.set_num_threads(1)


class Again:
    """Stands for a graph: calls the step's operations again, which write the same memory."""

    count = 0
    is_running = False

    def __init__(self, run: Callable[[], torch.Tensor]) -> None:
        self._run = run
        self.result = run()

    def run(self) -> None:
        Again.count += 1
        Again.is_running = True
        self.result.copy_(self._run())
        Again.is_running = False


class PackedSampling(EagerSampling):
    """Plain torch, whose results are in one memory, as those of kernels, and which recordings may hold."""

    def is_recordable(self, logits: torch.Tensor) -> bool:
        return True

    def likeliest(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = new_tokens(len(logits), logits.device)
        for packed, one in zip(tokens, super().likeliest(logits), strict=True):
            packed.copy_(one)
        return tokens


class PaddedBackend(EagerBackend[Any]):
    """Plain torch, with the rules of the backend for accelerators."""

    recording_rules = RULES

    def __init__(self) -> None:
        super().__init__(PlainLinear())
        self.sampling = PackedSampling()

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Any]:
        recording = Again(run)
        return recording.result, recording


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendDevice]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "none")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (1 << 36, 1 << 36))
    monkeypatch.setattr("quire.executor.worker.bind", lambda *_, **__: PaddedBackend())
    monkeypatch.setattr(Again, "count", 0)
    with PretendDevice() as device:
        yield device


def start(folder: Path, device: str) -> Worker:
    return start_worker(engine_config(folder, device=device, cache=CacheConfig(num_gpu_blocks_override=NUM_BLOCKS)))


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("qwen3")


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[int]]:
    return tokens_of(generate(start(folder, "cpu"), mixed_requests()))


@pytest.mark.parametrize("interval", [1, 20])
def test_tokens_are_those_of_the_cpu(
    folder: Path, expected: dict[str, list[int]], device: PretendDevice, monkeypatch: pytest.MonkeyPatch, interval: int
) -> None:
    assert RULES.interval == 20
    monkeypatch.setattr(PaddedBackend, "recording_rules", RULES._replace(interval=interval))
    worker = start(folder, "cuda")
    for options in ({"depth": 2}, {"max_num_batched_tokens": 24, "depth": 1}):
        assert tokens_of(generate(worker, mixed_requests(), **options)) == expected
    assert Again.count > 10


def device_requests() -> list[EngineRequest]:
    """Requests of which a recording chooses all tokens: greedy and drawn ones, with limits and penalties."""
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9, "seed": 3},
        {"temperature": 1.3, "top_p": 0.9, "top_k": 50, "seed": -8},
        {"presence_penalty": 0.6, "repetition_penalty": 1.3},
        {"temperature": 0.7, "min_p": 0.05, "frequency_penalty": 0.3, "seed": 5},
        {"temperature": 1.1, "seed": 7, "logprobs": 4},
    ]
    return [request(str(i), prompt_of(i, 1 + 7 * i % 40), max_tokens=20 + i, **kinds[i % 6]) for i in range(12)]


@pytest.fixture(scope="module")
def chosen_on_the_cpu(folder: Path) -> dict[str, list[RequestDelta]]:
    return generate(start(folder, "cpu"), device_requests())


@pytest.mark.parametrize("num_columns", [16, 2048], ids=["growing", "large"])
def test_recordings_choose_tokens_also_once_the_table_has_grown(
    folder: Path,
    chosen_on_the_cpu: dict[str, list[RequestDelta]],
    device: PretendDevice,
    monkeypatch: pytest.MonkeyPatch,
    num_columns: int,
) -> None:
    monkeypatch.setattr("quire.executor.step.request_table._FIRST_COLUMNS", num_columns)
    monkeypatch.setattr(PaddedBackend, "recording_rules", RULES._replace(interval=1))
    monkeypatch.setattr(Sampler, "sample", sample_prompts_alone)
    worker = start(folder, "cuda")
    options = {"depth": 2, "max_num_seqs": 5}
    deltas = generate(worker, device_requests(), **options)
    assert tokens_of(deltas) == tokens_of(chosen_on_the_cpu)
    assert {name for name in deltas if logprobs_of(deltas[name])} == {"5", "11"}
    for name in ("5", "11"):
        for got, expected in zip(logprobs_of(deltas[name]), logprobs_of(chosen_on_the_cpu[name]), strict=True):
            assert got.token_ids == expected.token_ids
            assert got.nth_likeliest == expected.nth_likeliest
            assert got.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert Again.count > 20


def logprobs_of(deltas: list[RequestDelta]) -> list[TokenLogprobs]:
    return [each for delta in deltas for each in delta.logprobs or []]


_sample = Sampler.sample


def sample_prompts_alone(self: Sampler, logits: torch.Tensor, batch: SampleBatch) -> Any:
    """Samples for rows that begin their outputs, as every step with prompts has."""
    assert (batch.positions == batch.num_prompt_tokens).any(), "decode steps choose their tokens themselves"
    return _sample(self, logits, batch)


class Outside(Launches):
    """Sees the launches of a step that no recording has."""

    def is_counted(self) -> bool:
        return not Again.is_running


@pytest.mark.parametrize("kind", [0, 3])
def test_a_recorded_step_is_one_launch_between_two_copies(
    folder: Path, device: PretendDevice, monkeypatch: pytest.MonkeyPatch, kind: int
) -> None:
    monkeypatch.setattr(PaddedBackend, "recording_rules", RULES._replace(interval=1))
    worker = start(folder, "cuda")
    seen: list[tuple[int, list[str]]] = []
    launch = worker.launch

    def watched(plan: StepPlan) -> Any:
        before = Again.count
        with Outside() as outside:
            step = launch(plan)
        if Again.count > before:
            seen.append((Again.count - before, outside.names))
        return step

    monkeypatch.setattr(worker, "launch", watched)
    generate(worker, [one for i, one in enumerate(device_requests()) if i % 6 == kind])
    assert len(seen) > 10
    assert all(each == (1, ["copy_", "copy_"]) for each in seen), seen


@pytest.mark.parametrize(("num_requests", "max_num_seqs"), [(9, 32), (14, 4)], ids=["leaving", "joining"])
def test_decode_steps_send_one_buffer_and_read_nothing(
    folder: Path, device: PretendDevice, monkeypatch: pytest.MonkeyPatch, num_requests: int, max_num_seqs: int
) -> None:
    """While rows leave, and others join; one copy brings a step's results."""
    monkeypatch.setattr(PaddedBackend, "attention_batch", TritonBackend.attention_batch)
    monkeypatch.setattr(PaddedBackend, "attention", attend)
    monkeypatch.setattr(PaddedBackend, "_recorder", SimpleNamespace(is_capturing=True), raising=False)
    worker = start(folder, "cuda")
    copies: list[tuple[int, dict[str, int], int]] = []
    launch = worker.launch

    def counted(plan: StepPlan) -> Any:
        is_decode = not plan.admitted and plan.num_scheduled == [1] * len(plan.slots)
        worker._ops._recorder.is_capturing = is_decode
        device.num_copies.clear()
        num_pinned = device.num_pinned
        with device.without_reads() if is_decode else contextlib.nullcontext():
            step = launch(plan)
        if is_decode and plan.slots:
            copies.append((len(plan.slots), dict(device.num_copies), device.num_pinned - num_pinned))
        return step

    monkeypatch.setattr(worker, "launch", counted)
    requests = [request(str(i), prompt_of(i, 3 + i), max_tokens=40 + 4 * i) for i in range(num_requests)]
    generate(worker, requests, max_num_seqs=max_num_seqs)
    assert {num_rows for num_rows, _, _ in copies} == set(range(1, min(num_requests, max_num_seqs) + 1))
    assert max_num_seqs > num_requests or len(copies) > 100
    assert all(copied == {"in": 1, "out": 1} for _, copied, _ in copies), copies
    assert sum(pinned for _, _, pinned in copies) < 20, "pinned memory is used again"


def attend(self: PaddedBackend, q: torch.Tensor, kv_cache: torch.Tensor, batch: Any, form: AttentionForm) -> Any:
    """Computes attention from what is on the device, for rows of one token."""
    rows = batch.rows
    if rows.max_query_len > 1:
        return EagerBackend.attention(self, q, kv_cache, batch, form)
    out = []
    for row in range(len(q)):
        positions = torch.arange(rows.block_tables.shape[1] * rows.block_size, device=q.device)
        slots = rows.block_tables[row].long()[positions // rows.block_size] * rows.block_size
        k, v = self.read_kv(kv_cache, slots + positions % rows.block_size)
        group = q.shape[1] // k.shape[1]
        scores = torch.einsum("hd,khd->hk", q[row].float(), k.float().repeat_interleave(group, 1)) * form.scale
        scores = scores.masked_fill(positions >= rows.seq_lens[row], float("-inf"))
        out.append(torch.einsum("hk,khd->hd", scores.softmax(-1), v.float().repeat_interleave(group, 1)))
    return torch.stack(out).to(q.dtype)


def test_recorded_steps_check_drafts(
    checkpoint: Callable[..., Path], device: PretendDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows free pages that earlier drafts still see; requests leave one by one, so that steps are padded."""
    folder = checkpoint("qwen3", sliding_window=20, layer_types=["sliding_attention", "full_attention"])
    requests = requests_of_all_kinds()
    expected = serve_here(folder)(requests, depth=1, enable_prefix_caching=False)
    monkeypatch.setattr(PaddedBackend, "recording_rules", RULES._replace(interval=1))
    config = engine_config(folder, device="cuda", cache=CacheConfig(num_gpu_blocks_override=NUM_BLOCKS))
    drafter = told(expected, requests)
    propose = drafter.propose
    monkeypatch.setattr(drafter, "propose", lambda *given: Proposal(*(each.to("cuda") for each in propose(*given))))
    worker = Worker(config, Rank(), ParallelGroup(), speculator=drafter)
    ready = worker.load()
    worker.allocate(ready.num_pages, ready.max_model_len)
    keys = worker._runner._recorded_steps._seen
    for _ in range(2):
        got = generate(worker, requests, depth=2, kv_groups=ready.kv_groups)
        check_same(got, expected)
    recorded = [key.shape for key, one in keys.items() if one is not None]
    assert any(not shape.are_apart for shape in recorded)
    assert Again.count > 20
    assert drafter.num_proposed > 100


@pytest.mark.parametrize("variant", ["lfm2", "mamba2", "qwen3.5", "bailing-hybrid", "recurrent-gemma"])
def test_padding_has_no_states(
    hybrid: Callable[[str], Path],  # noqa: F811
    device: PretendDevice,
    monkeypatch: pytest.MonkeyPatch,
    variant: str,
) -> None:
    """Requests leave one by one, so that steps are padded, and a slot that padding wrote would show."""
    requests = [request(str(i), prompt_of(i, 1 + 7 * (i % 3)), max_tokens=6 + 2 * i) for i in range(11)]
    with monkeypatch.context() as patch:
        patch.setattr("quire.executor.step.decode_inputs.MAX_ROWS", 0)
        expected = tokens_of(serve(hybrid(variant), device="cuda", caching=False).generate(requests))
    monkeypatch.setattr(PaddedBackend, "recording_rules", RULES._replace(interval=1, row_counts=(4, 16)))
    served = serve(hybrid(variant), device="cuda", caching=False)
    assert tokens_of(served.generate(requests)) == expected
    assert Again.count > 10
