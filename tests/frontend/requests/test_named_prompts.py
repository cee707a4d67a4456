"""Named prompts whose tokens the mean leaves out, as `include_prompt` of sentence-transformers' pooling says it."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from quire import LLM
from tests.frontend.pooling.test_embeddings import Reference
from tests.servers import ServerProcess
from tests.vector_servers import PROMPTS, serve


@pytest.fixture(scope="module")
def folder(embedding_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("excluding") / "model"
    shutil.copytree(embedding_checkpoint, folder)
    path = folder / "1_Pooling/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"include_prompt": False}))
    return folder


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    yield from serve(tmp_path_factory.mktemp("server"), folder)


@pytest.fixture(scope="module")
def expected(folder: Path) -> np.ndarray:
    """The vector of "a b" behind the prompt for queries."""
    reference = Reference(folder)
    states = reference.states(reference.ids(PROMPTS["query"] + "a b"))[len(reference.ids(PROMPTS["query"])) :]
    return states.mean(0) / np.linalg.norm(states.mean(0))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/embed", {"inputs": ["a b"], "prompt_name": "query"}),
        ("/v2/embed", {"texts": ["a b"], "input_type": "search_query"}),
    ],
)
def test_by_http(server: ServerProcess, expected: np.ndarray, path: str, body: dict) -> None:
    answer = httpx.post(server.base_url + path, json=body, timeout=60).raise_for_status().json()
    found = answer if path == "/embed" else answer["embeddings"]["float"]
    np.testing.assert_allclose(found, [expected], atol=2e-6)


def test_a_text_that_only_begins_so_is_whole(server: ServerProcess, expected: np.ndarray, folder: Path) -> None:
    body = {"inputs": [PROMPTS["query"] + "a b"]}
    found = httpx.post(f"{server.base_url}/embed", json=body, timeout=60).json()
    np.testing.assert_allclose(found, [Reference(folder).vector(PROMPTS["query"] + "a b")], atol=2e-6)
    assert np.abs(found[0] - expected).max() > 1e-3


def test_in_python(folder: Path, expected: np.ndarray) -> None:
    with LLM(str(folder), device="cpu", max_model_len=64, num_gpu_blocks_override=64) as llm:
        [named, again] = llm.embed(["a b", "a b"], prompt_name="query")
        np.testing.assert_allclose(named.outputs.embedding, expected, atol=2e-6)
        assert again.outputs == named.outputs
        [plain] = llm.embed([PROMPTS["query"] + "a b"])
        assert plain.outputs != named.outputs
