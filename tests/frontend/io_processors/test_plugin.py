"""A plugin of an installed package around a model of vectors, by HTTP and in Python."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from quire import LLM, PoolingParams
from quire.core.errors import ConfigError, ParameterError
from tests.servers import ServerProcess
from tests.vector_servers import SMALL

CODE = '''
from quire.plugins.io_processors.interface import IOProcessor


class Pages(IOProcessor):
    """Compares the first page with each other one."""

    def parse_data(self, data):
        if not isinstance(data, dict) or not data.get("pages"):
            raise ValueError("pages must not be empty")
        return data["pages"]

    def pre_process(self, prompt, request_id=None, **kwargs):
        return prompt

    def post_process(self, model_output, request_id=None, **kwargs):
        first, *others = (output.outputs.data for output in model_output)
        width = self.vllm_config.model_config.max_model_len
        return {"cosines": [float(first @ other) for other in others], "first": first, "longest": width}


def register():
    return "pages_plugin.Pages"


class Other:
    """Without a class of ours, with tokens, and with parameters of its own."""

    def __init__(self, vllm_config, renderer):
        self.tokenizer = renderer.get_tokenizer()

    def parse_data(self, data):
        return data

    def merge_pooling_params(self, params=None):
        class Params:
            task, use_activation = "plugin", False

        return Params()

    def pre_process(self, prompt, request_id=None, **kwargs):
        return self.tokenizer(prompt)["input_ids"]

    def post_process(self, model_output, request_id=None, **kwargs):
        return [output.outputs.data.tolist() for output in model_output]


def register_other():
    return "pages_plugin.Other"
'''
POINTS = """
[quire.io_processor_plugins]
pages = pages_plugin:register

[vllm.io_processor_plugins]
other = pages_plugin:register_other
broken = pages_plugin:nothing
"""
DATA = {"pages": ["a quire", "a page", "a quire"]}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an installed package that has the plugins."""
    folder = tmp_path_factory.mktemp("package")
    (folder / "pages_plugin.py").write_text(CODE)
    info = folder / "pages_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pages-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(POINTS)
    return folder


@pytest.fixture(scope="module")
def server(
    package: Path, embedding_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    path = os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")])
    options = (*SMALL, "--served-model-name", "tiny", "--io-processor-plugin", "pages")
    server = ServerProcess(
        tmp_path_factory.mktemp("server"), str(embedding_checkpoint), *options, env={"PYTHONPATH": path}
    )
    yield server.wait_until_ready()
    server.stop()


def vectors(server: ServerProcess) -> np.ndarray:
    answer = httpx.post(f"{server.base_url}/v1/embeddings", json={"input": DATA["pages"]}, timeout=60).json()
    return np.array([each["embedding"] for each in answer["data"]])


@pytest.mark.parametrize("path", ["/pooling", "/invocations"])
def test_pooling_answers_what_the_plugin_makes(server: ServerProcess, path: str) -> None:
    body = {"data": DATA, "task": "plugin", "request_id": "mine"}
    answer = httpx.post(server.base_url + path, json=body, timeout=60).raise_for_status().json()
    first, *others = vectors(server)
    assert answer["data"]["cosines"] == pytest.approx([float(first @ other) for other in others], abs=1e-5)
    np.testing.assert_allclose(answer["data"]["first"], first, atol=1e-6)  # a tensor
    assert answer["data"]["longest"] == 64
    assert (answer["request_id"], set(answer)) == ("pooling-mine", {"request_id", "created_at", "data"})


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"data": {"pages": []}}, "data", "pages must not be empty"),
        ({"data": {"pages": ["a", "word " * 70]}}, "data[1]", "64"),
        ({"data": DATA, "task": "embed"}, "task", "plugin"),
    ],
)
def test_data_that_is_refused(server: ServerProcess, body: dict, param: str, words: str) -> None:
    answer = httpx.post(f"{server.base_url}/pooling", json=body, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert words in answer.json()["error"]["message"]


def test_a_plugin_in_python(package: Path, embedding_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that vLLM's group names, that knows nothing of Quire's classes, and that asks for no activation."""
    monkeypatch.syspath_prepend(package)
    options = {"device": "cpu", "max_model_len": 64, "num_gpu_blocks_override": 64}
    with LLM(str(embedding_checkpoint), io_processor_plugin="other", **options) as llm:
        [output] = llm.encode({"data": DATA["pages"][0]}, pooling_task="plugin")
        [plain] = llm.encode(DATA["pages"][0], PoolingParams(use_activation=False))
        assert output.outputs == [plain.outputs.data.tolist()]
        assert (output.prompt_token_ids, output.finished) == ([], True)
        with pytest.raises(ParameterError, match='pooling_task="plugin"'):
            llm.encode({"data": 1})
        with pytest.raises(ParameterError, match='pooling_task="plugin"'):
            llm.encode("a", pooling_task="plugin")


@pytest.mark.parametrize(
    ("name", "words"), [("nobody", "those that are there: pages, other, broken"), ("broken", "cannot be loaded")]
)
def test_a_plugin_that_cannot_be_loaded(
    package: Path, embedding_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    monkeypatch.syspath_prepend(package)
    with pytest.raises(ConfigError, match=words):
        LLM(str(embedding_checkpoint), io_processor_plugin=name, device="cpu", max_model_len=64)


def test_a_model_without_vectors_has_no_plugin(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="--runner pooling"):
        LLM(str(checkpoint("llama")), io_processor_plugin="pages", device="cpu")
