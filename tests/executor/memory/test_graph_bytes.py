"""The memory of CUDA graphs in the plan, and memory that other processes take while a worker starts."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from quire.core.config.graphs import GraphConfig
from quire.core.config.resolved import EngineConfig
from quire.core.errors import ModelLoadError
from quire.executor.memory.plan import DeviceMemory, MemoryNeeds, graph_bytes, still_free
from quire.executor.memory.rank_memory import RankMemory
from quire.ops.recording import RecordingRules
from tests.frontend.launch.test_graphs import SPEC, config

RULES = RecordingRules((1, 4, 16), (32, 64), shared_bytes=1000, each_bytes=10)
MODEL: Any = SimpleNamespace(activation_size=100)
A_ROW = (4 * SPEC.hidden_size + 100 + 2 * SPEC.vocab_size) * 4
"""Bytes of a row's activations in float32, and of its logits, which the sampler writes once more."""


def planned(rules: RecordingRules = RULES, **changes: Any) -> int:
    asked: EngineConfig = replace(config(max_num_seqs=9, max_model_len=40), **changes)
    return graph_bytes(SPEC, MODEL, asked, rules)


def test_all_graphs_share_the_largest_step_and_each_has_memory_of_its_own() -> None:
    assert planned() == 16 * A_ROW + 1000 + 3 * 2 * 5 * 10, "nine requests have graphs of 16 rows, and of two lengths"
    assert planned(graphs=GraphConfig(sizes=[4])) == 4 * A_ROW + 1000 + 1 * 2 * 5 * 10
    assert planned(graphs=GraphConfig(max_size=4)) == 4 * A_ROW + 1000 + 2 * 2 * 5 * 10
    assert planned(max_model_len=20) == 16 * A_ROW + 1000 + 3 * 5 * 10


def test_steps_that_check_drafts_have_rows_and_graphs_of_their_own() -> None:
    rules = RULES._replace(row_counts=(1, 4, 16, 64), drafts_as="rows")
    assert planned(rules) == 64 * A_ROW + 1000 + 4 * 2 * 6 * 10
    assert planned(rules, speculation=None) == 16 * A_ROW + 1000 + 3 * 2 * 5 * 10
    assert planned(rules, graphs=GraphConfig(max_size=4)) == 4 * A_ROW + 1000 + 2 * 2 * 6 * 10


def test_what_is_not_captured_takes_no_memory() -> None:
    assert planned(enforce_eager=True) == 0
    assert planned(graphs=GraphConfig(is_enabled=False)) == 0
    assert planned(RecordingRules()) == 0, "lists of launches on a CPU"


@pytest.mark.parametrize(("now", "expected"), [(60, 80), (25, 45), (200, 80)])
def test_what_other_processes_took_during_the_load_is_not_planned(
    monkeypatch: pytest.MonkeyPatch, now: int, expected: int
) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (now, 100))
    before = DeviceMemory(100, 80)
    assert still_free(before, 20, torch.device("cuda")) == DeviceMemory(100, expected)
    assert still_free(before, 20, torch.device("cpu")) == before


def test_pages_that_no_longer_fit_are_told() -> None:
    def allocate(num_pages: int) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    pages: Any = SimpleNamespace(page_bytes=2**30, groups=[], allocate=allocate)
    held = RankMemory(states=SimpleNamespace(), pages=pages, groups=[], needs=MemoryNeeds(0, 0, 2**30))  # type: ignore[arg-type]
    with pytest.raises(ModelLoadError, match=r"KV cache of 7\.00 GiB no longer fits .* lower --gpu-memory-utilization"):
        held.allocate_pages(7)
