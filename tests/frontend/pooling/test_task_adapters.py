"""A checkpoint of Jina v3, whose requests choose the adapter of a task: vectors are those of merged weights."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from transformers import AutoTokenizer

from quire import LLM
from quire.core.errors import ConfigError, ParameterError
from tests.checkpoints import make_tokenizer
from tests.executor.models.tiny_encoders import TASKS, hidden_states, merged_jina, write_jina
from tests.servers import ServerProcess

INSTRUCTIONS = {"retrieval.query": "Find pages for: ", "text-matching": "", "separation": "Cluster: "}
TEXT = "A quire is a gathering of pages."
OPTIONS = {"max_model_len": 96, "device": "cpu", "dtype": "float32"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("jina") / "model"
    tokenizer = make_tokenizer(384, 128)
    write_jina(folder, vocab_size=len(tokenizer))
    tokenizer.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"task_instructions": INSTRUCTIONS}))
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 48, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
    return folder


@pytest.fixture(scope="module")
def vector(folder: Path) -> Callable[..., np.ndarray]:
    """The published formula: the task's adapter in the weights, and its instruction before the text."""
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def compute(task: str, text: str = TEXT, *, has_instruction: bool = True) -> np.ndarray:
        text = INSTRUCTIONS.get(task, "") * has_instruction + text
        mean = hidden_states(merged_jina(folder, task), tokenizer(text)["input_ids"]).mean(0)
        return torch.nn.functional.normalize(mean, dim=0).numpy()

    return compute


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    server = ServerProcess(tmp_path_factory.mktemp("server"), str(folder), *flags)
    yield server.wait_until_ready()
    server.stop()


def ask(server: ServerProcess, **fields: Any) -> httpx.Response:
    return httpx.post(f"{server.base_url}/v1/embeddings", json=fields, timeout=60)


def test_requests_choose_tasks(server: ServerProcess, vector: Callable[..., np.ndarray]) -> None:
    """At once, so that they share steps; one without a task has that of the loaded weights, and no instruction."""
    tasks: list[str | None] = [*TASKS, "none", None] * 2

    async def all_of_them() -> list[list[float]]:
        async with openai.AsyncOpenAI(base_url=f"{server.base_url}/v1", api_key="none") as client:
            bodies = [{} if task is None else {"task": task} for task in tasks]
            made = [client.embeddings.create(model="", input=TEXT, extra_body=body) for body in bodies]
            return [answer.data[0].embedding for answer in await asyncio.gather(*made)]

    for task, got in zip(tasks, asyncio.run(all_of_them()), strict=True):
        expected = vector("text-matching", has_instruction=False) if task is None else vector(task)
        np.testing.assert_allclose(got, expected, atol=2e-6, err_msg=str(task))


def test_token_ids_are_complete(server: ServerProcess, folder: Path, vector: Callable[..., np.ndarray]) -> None:
    ids = AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"]
    [got] = ask(server, input=ids, task="retrieval.query").raise_for_status().json()["data"]
    np.testing.assert_allclose(got["embedding"], vector("retrieval.query", has_instruction=False), atol=2e-6)


def test_unknown_tasks_are_refused(server: ServerProcess, embedding_server: ServerProcess) -> None:
    for where, message in (
        (server, "is none that this server has, which are retrieval.query, "),
        (embedding_server, "has none"),
    ):
        answer = ask(where, input=TEXT, task="ranking")
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "task"
        assert message in answer.json()["error"]["message"]


def test_python_chooses_tasks(folder: Path, vector: Callable[..., np.ndarray]) -> None:
    fixed = {"jina_task": "separation"}
    with LLM(str(folder), hf_overrides=fixed, **OPTIONS) as llm:
        [got] = llm.embed(TEXT, adapter_task="separation")
        np.testing.assert_allclose(got.outputs.embedding, vector("separation"), atol=2e-6)
        with pytest.raises(ParameterError, match="start the server without jina_task"):
            llm.embed(TEXT, adapter_task="retrieval.query")
    with LLM(str(folder), **OPTIONS) as llm:
        [got] = llm.embed(TEXT, adapter_task="retrieval.query")
        np.testing.assert_allclose(got.outputs.embedding, vector("retrieval.query"), atol=2e-6)
        with pytest.raises(ParameterError, match="leave prompt_name"):
            llm.embed(TEXT, adapter_task="separation", prompt_name="separation")
    with pytest.raises(ConfigError, match="--enable-lora is for adapters in folders"):
        LLM(str(folder), enable_lora=True, **OPTIONS)
