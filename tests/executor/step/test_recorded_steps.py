"""Steps from recordings: the same tokens as without, in any batch, and recordings are used."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from quire.core.config.graphs import GraphConfig
from quire.core.config.model import ModelConfig
from quire.core.config.resolved import EngineConfig
from quire.executor.recordings import rules_for
from quire.executor.worker import Worker
from quire.frontend.checkpoint.model_spec import read_model_spec
from quire.ops.cpu.libraries import load_kernels
from quire.ops.cpu.native import NativeBackend
from quire.ops.recording import RecordingRules
from tests.executor.step.test_model_runner import (
    engine_config,
    generate,
    mixed_requests,
    request,
    start_worker,
    tokens_of,
)


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("qwen3")


def bf16_config(folder: Path) -> EngineConfig:
    return engine_config(folder, spec=read_model_spec(folder, ModelConfig(model=str(folder), dtype="bfloat16")))


PADDED = RecordingRules(row_counts=(4, 8, 24), max_seq_lens=(32, 64), interval=3)
"""Steps of more rows, or of longer sequences, have shapes of their own."""


@pytest.fixture(scope="module", params=[RecordingRules(), PADDED], ids=["exact", "padded"])
def worker(folder: Path, request: pytest.FixtureRequest) -> Iterator[Worker]:
    if load_kernels() is None:
        pytest.skip("plain torch cannot be recorded")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NativeBackend, "recording_rules", request.param)
        yield start_worker(bf16_config(folder))


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[int]]:
    """Outputs of mixed requests on a worker without recordings, one request at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quire.executor.step.decode_inputs.MAX_ROWS", 0)
        plain = start_worker(bf16_config(folder))
        tokens: dict[str, list[int]] = {}
        for one in mixed_requests():
            tokens |= tokens_of(generate(plain, [one], depth=1, enable_prefix_caching=False))
    return tokens


@pytest.mark.parametrize(
    "options", [{"depth": 2}, {"max_num_batched_tokens": 24}, {"num_pages": 24, "depth": 1}], ids=str
)
def test_tokens_are_those_of_the_ordinary_way(
    worker: Worker, expected: dict[str, list[int]], launched: list[int], options: dict[str, Any]
) -> None:
    """Covers chunked prompts, changing batches, sampling features and preemption."""
    for _ in range(2):  # the second time, most decode steps have a recording
        launched.clear()
        assert tokens_of(generate(worker, mixed_requests(), **options)) == expected
    assert launched


def test_a_lone_request_is_one_call_a_step(worker: Worker, launched: list[int]) -> None:
    for _ in range(2):
        generate(worker, [request("a", [5, 6, 7], max_tokens=24)])
    launched.clear()
    generate(worker, [request("b", [8, 9, 10], max_tokens=24)])
    assert len(launched) == 23, "all but the prompt's"
    assert len(set(launched)) == 1, "every step is the same list of launches"


def test_scored_prompts_and_the_steps_beside_them_go_the_ordinary_way(worker: Worker, launched: list[int]) -> None:
    both = [request("a", [5, 6, 7, 8], max_tokens=8), request("b", [9, 8, 7], max_tokens=1, prompt_logprobs=1)]
    generate(worker, both)
    launched.clear()
    deltas = generate(worker, both)
    assert any(delta.output for delta in deltas["b"])
    assert tokens_of(deltas)["a"] == tokens_of(generate(worker, both[:1]))["a"]


def test_the_shapes_used_last_are_kept(worker: Worker, monkeypatch: pytest.MonkeyPatch, launched: list[int]) -> None:
    monkeypatch.setattr("quire.executor.step.recorded_steps.MAX_RECORDINGS", 2)
    one, two = [request("a", [5, 6], max_tokens=12)], [request(name, [5, 6], max_tokens=12) for name in "ab"]
    first = tokens_of(generate(worker, one))
    for requests in (two, one, two, one, one):
        tokens = tokens_of(generate(worker, requests))
        assert tokens["a"] == first["a"]
    assert launched


def test_a_shape_is_rounded_up_and_recorded_at_intervals(
    folder: Path, launched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if load_kernels() is None:
        pytest.skip("plain torch cannot be recorded")
    made: list[int] = []
    record = NativeBackend.record

    def count(self: NativeBackend, run: Any) -> Any:
        made.append(len(launched))
        return record(self, run)

    monkeypatch.setattr(NativeBackend, "record", count)
    monkeypatch.setattr(NativeBackend, "recording_rules", PADDED)
    worker = start_worker(bf16_config(folder))
    steps = worker._runner._recorded_steps
    assert [steps.choose_shape(*each)[:2] for each in ((1, 1), (4, 32), (5, 33), (24, 64), (25, 65))] == [
        (4, 32), (4, 32), (8, 64), (24, 64), (25, worker._runner._inputs.table.max_seq_len),
    ]  # fmt: skip
    for number in (1, 3, 2, 4):  # all in one shape
        generate(worker, [request(str(i), [5, 6, 7], max_tokens=12) for i in range(number)])
    assert len(made) == 1
    assert len(launched) == 4 * 11 - 2
    generate(worker, [request(str(i), [5, 6, 7], max_tokens=12) for i in range(6)])
    generate(worker, [request("a", [5, 6, 7] * 14, max_tokens=12)])
    assert len(made) == 3


def test_steps_are_not_recorded_on_request(
    folder: Path, expected: dict[str, list[int]], launched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM's `--enforce-eager`."""
    monkeypatch.setattr(NativeBackend, "recording_rules", PADDED)
    worker = start_worker(replace(bf16_config(folder), enforce_eager=True))
    for _ in range(2):
        assert tokens_of(generate(worker, mixed_requests())) == expected
    assert not launched


@pytest.mark.parametrize(
    ("graphs", "row_counts", "max_rows"),
    [
        (GraphConfig(), [1, 4, 40], None),
        (GraphConfig(sizes=[2, 8]), [2, 8], 8),
        (GraphConfig(max_size=20), [1, 4, 20], 20),
        (GraphConfig(max_size=4), [1, 4], 4),
        (GraphConfig(sizes=[2, 8], max_size=8, is_fine=True), [2, 8], 8),
        (GraphConfig(is_fine=True), [*range(1, 33), 40], None),
    ],
)
def test_the_user_chooses_the_steps_that_have_graphs(
    graphs: GraphConfig, row_counts: list[int], max_rows: int | None
) -> None:
    rules = rules_for(RecordingRules(row_counts=(1, 4, 40), interval=7), graphs)
    assert (list(rules.row_counts), rules.max_rows, rules.interval) == (row_counts, max_rows, 7)
    assert rules_for(RecordingRules(), graphs) == RecordingRules(), "lists of launches are no graphs"


def test_steps_beyond_the_greatest_size_are_not_recorded(
    folder: Path, launched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if load_kernels() is None:
        pytest.skip("plain torch cannot be recorded")
    monkeypatch.setattr(NativeBackend, "recording_rules", PADDED)
    worker = start_worker(replace(bf16_config(folder), graphs=GraphConfig(sizes=[2])))
    for number in (3, 3, 1, 1):
        launched.clear()
        generate(worker, [request(str(i), [5, 6, 7], max_tokens=12) for i in range(number)])
        assert bool(launched) == (number <= 2)
