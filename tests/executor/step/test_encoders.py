"""Encoders through scheduler, runner and worker: company, ranks and order do not show in a request's vectors."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from quire.core.config.cache import CacheConfig
from quire.core.wire.protocol import EngineRequest, FinishReason
from quire.core.wire.rank import Layout, Rank
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.step.heads import pooler
from quire.executor.worker import Worker
from tests.executor.models.tiny_encoders import VOCAB_SIZE, hidden_states, write_encoder
from tests.executor.step.heads.test_pooler import pool, vectors_of
from tests.executor.step.test_model_runner import engine_config, generate
from tests.executor.thread_group import on_every_rank

torch.set_num_threads(1)

LENGTHS = (40, 1, 7, 90, 2, 60, 1, 33)
PROMPTS = [[(37 * place * place + 11 * place + size) % 197 + 3 for place in range(size)] for size in LENGTHS]
TYPES = [[int(place > 2) for place in range(size)] for size in LENGTHS]


def requests() -> list[EngineRequest]:
    """Each prompt in three ways, and in a fourth with two segments."""
    plain = [
        pool(f"{way} {index}", prompt, way) for index, prompt in enumerate(PROMPTS) for way in ("last", "mean", "all")
    ]
    typed = [
        msgspec.structs.replace(pool(f"typed {index}", prompt, "mean"), token_type_ids=types)
        for index, (prompt, types) in enumerate(zip(PROMPTS, TYPES, strict=True))
    ]
    return plain + typed


def serve(folder: Path, group: ParallelGroup | None = None) -> tuple[Worker, dict[str, Any]]:
    group = group or ParallelGroup()
    config = engine_config(folder, cache=CacheConfig(), layout=Layout(tensor=group.size), max_model_len=128)
    worker = Worker(config, Rank(tensor=group.rank), group)
    ready = worker.load()
    assert (ready.num_pages, ready.kv_cache_bytes, ready.kv_groups) == (0, 0, [])
    assert ready.max_model_len == 128
    worker.allocate(ready.num_pages, ready.max_model_len)
    return worker, {"kv_groups": [], "num_pages": 0, "max_model_len": 128, "num_token_types": 2, "whole_prompts": True}


def vectors(served: tuple[Worker, dict[str, Any]], asked: list[EngineRequest], **options: Any) -> dict[str, np.ndarray]:
    worker, facts = served
    got = generate(worker, asked, **{"max_num_batched_tokens": 128, **facts, **options})
    assert all(deltas[-1].finish_reason is FinishReason.STOP for deltas in got.values())
    return {name: vectors_of([delta.output for delta in deltas]) for name, deltas in got.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    write_encoder(folder, "bert")
    return folder


def test_vectors_are_those_of_transformers_in_any_company(folder: Path, tmp_path: Path) -> None:
    reference, served = write_encoder(tmp_path, "bert"), serve(folder)
    got = vectors(served, requests())
    for index, (prompt, types) in enumerate(zip(PROMPTS, TYPES, strict=True)):
        states = hidden_states(reference, prompt).numpy()
        typed = hidden_states(reference, prompt, types).numpy()
        expected = {"last": states[-1:], "mean": states.mean(0, keepdims=True), "all": states}
        expected["typed"] = typed.mean(0, keepdims=True)
        for way, values in expected.items():
            np.testing.assert_allclose(got[f"{way} {index}"], values, atol=2e-5)
    for options in ({"depth": 3, "max_num_seqs": 3}, {"max_num_batched_tokens": 90}, {"enable_chunked_prefill": False}):
        for name, values in vectors(served, requests()[::-1], **options).items():
            np.testing.assert_allclose(values, got[name], atol=1e-6)


@pytest.mark.parametrize("at_once", [2**23, 7 * VOCAB_SIZE])
def test_weights_of_the_vocabulary_are_splades(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """All of a prompt's scores at once, or those of seven tokens."""
    monkeypatch.setattr(pooler, "_MAX_SCORES", at_once)
    reference = write_encoder(tmp_path, "bert", "ForMaskedLM")
    asked = [
        pool(f"{way} {index}", prompt, way)  # type: ignore[arg-type]
        for index, prompt in enumerate(PROMPTS)
        for way in ("splade_max", "splade_sum")
    ]
    got = vectors(serve(tmp_path), asked)
    for index, prompt in enumerate(PROMPTS):
        with torch.inference_mode():
            weights = torch.log1p(torch.relu(reference(input_ids=torch.tensor([prompt])).logits[0]))
        np.testing.assert_allclose(got[f"splade_max {index}"][0], weights.amax(0), atol=1e-5)
        np.testing.assert_allclose(got[f"splade_sum {index}"][0], weights.sum(0), rtol=1e-4, atol=1e-5)


def test_ranks_find_the_same(folder: Path) -> None:
    expected = vectors(serve(folder), requests())
    for got in on_every_rank(2, lambda group: vectors(serve(folder, group), requests())):
        for name, values in got.items():
            np.testing.assert_allclose(values, expected[name], atol=1e-5)
