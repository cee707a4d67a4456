"""/v1/embeddings and /pooling of a real server: values are Transformers', formats are read by OpenAI's client."""

import base64
import json
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from tests.frontend.http.test_disconnect import JSON, aborted, sample, wait_until_idle
from tests.servers import ServerProcess
from tests.vector_servers import PROMPTS

TEXTS = ["The quick brown fox jumps over the lazy dog.", "Hello", "Grüße aus Köln, 你好"]


@pytest.fixture(scope="module")
def url(embedding_server: ServerProcess) -> str:
    return embedding_server.base_url


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none")


class Reference:
    """The model in Transformers, and its tokenizer."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModel.from_pretrained(folder, dtype=torch.float32)

    def states(self, ids: list[int]) -> np.ndarray:
        """The hidden states of all tokens."""
        with torch.inference_mode():
            return self._model(torch.tensor([ids])).last_hidden_state[0].numpy()

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text)["input_ids"]

    def vector(self, prompt: str | list[int]) -> np.ndarray:
        mean = self.states(self.ids(prompt) if isinstance(prompt, str) else prompt).mean(0)
        return mean / np.linalg.norm(mean)


@pytest.fixture(scope="module")
def reference(embedding_checkpoint: Path) -> Reference:
    return Reference(embedding_checkpoint)


def ask(url: str, path: str = "/v1/embeddings", **fields: Any) -> httpx.Response:
    return httpx.post(url + path, json=fields, timeout=60)


def vectors_of(answer: httpx.Response) -> np.ndarray:
    answer.raise_for_status()
    assert [each["index"] for each in answer.json()["data"]] == list(range(len(answer.json()["data"])))
    return np.array([each["embedding"] for each in answer.json()["data"]], np.float32)


def test_vectors_are_those_of_transformers_in_openais_client(client: openai.OpenAI, reference: Reference) -> None:
    """The client asks for base64 by itself, and decodes it."""
    expected = np.array([reference.vector(text) for text in TEXTS])
    answer = client.embeddings.create(model="tiny", input=TEXTS)
    np.testing.assert_allclose([each.embedding for each in answer.data], expected, atol=2e-6)
    floats = client.embeddings.create(model="tiny", input=TEXTS, encoding_format="float")
    np.testing.assert_array_equal(
        [each.embedding for each in answer.data], np.float32([e.embedding for e in floats.data])
    )
    num_tokens = sum(len(reference.ids(text)) for text in TEXTS)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (num_tokens, num_tokens)
    assert (answer.object, answer.model, [each.object for each in answer.data]) == ("list", "tiny", ["embedding"] * 3)
    ids = client.embeddings.create(model="tiny", input=[reference.ids(text) for text in TEXTS])
    np.testing.assert_array_equal([each.embedding for each in ids.data], [each.embedding for each in answer.data])


def test_each_form_of_input(url: str, reference: Reference) -> None:
    ids = reference.ids(TEXTS[0])
    one = vectors_of(ask(url, input=TEXTS[0]))
    np.testing.assert_array_equal(vectors_of(ask(url, input=ids)), one)
    np.testing.assert_array_equal(vectors_of(ask(url, input=[TEXTS[0]] * 3)), np.repeat(one, 3, 0))
    talk = [{"role": "user", "content": "Hello"}]
    rendered = reference.tokenizer.apply_chat_template(talk, tokenize=False)
    expected = reference.vector(rendered)
    for fields in ({"messages": talk}, {"input": talk}, {"messages": [talk, talk]}, {"input": [talk, talk]}):
        for vector in vectors_of(ask(url, **fields)):
            np.testing.assert_allclose(vector, expected, atol=2e-6)
    prompted = reference.tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    [vector] = vectors_of(ask(url, messages=talk, add_generation_prompt=True))
    np.testing.assert_allclose(vector, reference.vector(prompted), atol=2e-6)


def test_equal_inputs_are_computed_once_and_counted_each(url: str) -> None:
    once, thrice = ask(url, input=["abc def"]).json(), ask(url, input=["abc def"] * 3).json()
    assert [each["embedding"] for each in thrice["data"]] == [once["data"][0]["embedding"]] * 3
    assert thrice["usage"]["prompt_tokens"] == 3 * once["usage"]["prompt_tokens"]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"])
def test_base64_in_each_number_format(url: str, dtype: str) -> None:
    kind = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}.get(dtype) or getattr(torch, dtype)
    [exact] = vectors_of(ask(url, input=TEXTS[0]))
    answer = ask(url, input=TEXTS[0], encoding_format="base64", embed_dtype=dtype, endianness="little").json()
    found = torch.frombuffer(bytearray(base64.b64decode(answer["data"][0]["embedding"])), dtype=kind)
    assert found.float().tolist() == torch.from_numpy(exact).to(kind).float().tolist()


def test_plain_bytes(url: str) -> None:
    exact = vectors_of(ask(url, input=TEXTS))
    answer = ask(url, input=TEXTS, encoding_format="bytes", embed_dtype="float32", endianness="big", request_id="mine")
    assert answer.headers["content-type"] == "application/octet-stream"
    metadata = json.loads(answer.headers["metadata"])
    assert (metadata["id"], metadata["model"]) == ("embd-mine", "tiny")
    assert metadata["usage"]["prompt_tokens"] == metadata["usage"]["total_tokens"] > 0
    for place, vector in zip(metadata["data"], exact, strict=True):
        assert (place["embed_dtype"], place["endianness"], place["shape"]) == ("float32", "big", [64])
        found = np.frombuffer(answer.content[place["start"] : place["end"]], ">f4")
        np.testing.assert_array_equal(found, vector)
    alone = ask(url, input=TEXTS, encoding_format="bytes_only")
    assert "metadata" not in alone.headers
    np.testing.assert_array_equal(np.frombuffer(alone.content, "f4").reshape(3, 64), exact)


def test_fewer_dimensions_and_no_activation(url: str, reference: Reference) -> None:
    whole = reference.states(reference.ids(TEXTS[0])).mean(0)
    [raw] = vectors_of(ask(url, input=TEXTS[0], use_activation=False))
    np.testing.assert_allclose(raw, whole, atol=2e-5)
    [short] = vectors_of(ask(url, input=TEXTS[0], dimensions=16))
    np.testing.assert_allclose(short, whole[:16] / np.linalg.norm(whole[:16]), atol=2e-6)


def test_truncation_keeps_the_first_tokens(url: str, reference: Reference) -> None:
    ids = reference.ids(TEXTS[0])
    for fields, kept in (
        ({"truncate_prompt_tokens": 3}, ids[:3]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, ids[:3]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, ids[-3:]),
    ):
        for given in (TEXTS[0], ids):
            answer = ask(url, input=given, **fields)
            np.testing.assert_allclose(vectors_of(answer)[0], reference.vector(kept), atol=2e-6)
            assert answer.json()["usage"]["prompt_tokens"] == 3
    long = ask(url, input="word " * 100, truncate_prompt_tokens=-1)
    assert long.json()["usage"]["prompt_tokens"] == 64
    padded = ask(url, input=ids, padding="max_length")
    np.testing.assert_allclose(vectors_of(padded)[0], reference.vector(ids + [0] * (64 - len(ids))), atol=2e-6)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({}, "input", "input or messages"),
        ({"input": []}, "input", "empty"),
        ({"input": ["a", 5]}, "input", "mixture"),
        ({"input": [[]]}, "input", "empty"),
        ({"input": ""}, "input", "empty"),
        ({"input": "a", "messages": []}, "messages", "not both"),
        ({"input": [{"role": "user", "content": "a"}, "b"]}, "input", "conversation"),
        ({"input": [5] * 65}, "input", "64"),
        ({"input": "word " * 200}, "input", "64"),
        ({"input": [512345]}, "input", "vocabulary"),
        ({"input": "a", "dimensions": 17}, "dimensions", "16, 32"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "take base64, bytes, bytes_only or float"),
        ({"input": "a", "normalize": True}, "normalize", "use_activation"),
        ({"input": "a", "truncate_prompt_tokens": 65}, "truncate_prompt_tokens", "64"),
        ({"input": "a", "priority": 2**63}, "priority", "64 bits"),
        ({"input": "a", "cache_salt": ""}, "cache_salt", "empty"),
        ({"input": "a", "mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs", "conversations"),
        ({"input": "a", "chat_template": "x"}, "chat_template", "conversations"),
        ({"input": "a", "add_generation_prompt": True}, "add_generation_prompt", "conversations"),
        ({"messages": [{"role": "user", "content": "a"}], "chat_template": "x"}, "chat_template", "--trust-request"),
        ({"input": ["a"] * 16385}, "input", "16384"),
        ({"input": "a", "late_chunking_params": {"chunk_size": 0}}, "chunk_size", "positive"),
    ],
)
def test_bad_fields_are_named(url: str, fields: dict[str, Any], param: str, words: str) -> None:
    answer = ask(url, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert words in error["message"]


def test_another_model_is_not_served(url: str) -> None:
    assert ask(url, input="a", model="other").status_code == 404


def test_pooling_gives_any_task(url: str, reference: Reference) -> None:
    ids = reference.ids(TEXTS[0])
    states = reference.states(ids)
    answer = ask(url, "/pooling", input=TEXTS[0], task="token_embed").json()
    assert (answer["object"], answer["data"][0]["object"]) == ("list", "pooling")
    np.testing.assert_allclose(
        answer["data"][0]["data"], states / np.linalg.norm(states, axis=1, keepdims=True), atol=2e-6
    )
    [whole] = ask(url, "/pooling", input=TEXTS[0]).json()["data"]
    np.testing.assert_allclose(whole["data"], reference.vector(TEXTS[0]), atol=2e-6)
    raw = ask(url, "/pooling", input=ids, task="token_embed", use_activation=False, encoding_format="bytes")
    [place] = json.loads(raw.headers["metadata"])["data"]
    assert place["shape"] == [len(ids), 64]
    np.testing.assert_allclose(np.frombuffer(raw.content, "f4").reshape(place["shape"]), states, atol=2e-5)
    for task, words in (("classify", "embed, token_embed"), ("score", "classify"), ("nothing", "embed, token_embed")):
        refused = ask(url, "/pooling", input="a", task=task)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "task")
        assert words in refused.json()["error"]["message"]
    assert ask(url, "/pooling", data={"a": 1}).json()["error"]["param"] == "data"


def test_late_chunking_tells_the_places_of_its_chunks(url: str, reference: Reference) -> None:
    """The model makes vectors of tokens as well, which late chunking asks for."""
    states = reference.states(reference.ids(TEXTS[0]))
    [found] = ask(url, input=TEXTS[0], late_chunking_params={"chunk_size": 4}).json()["data"]
    chunks = [states[start : start + 4].mean(0) for start in range(0, len(states), 4)]
    expected = np.array([chunk / np.linalg.norm(chunk) for chunk in chunks])
    np.testing.assert_allclose(found["embedding"], expected, atol=2e-6)
    places = found["late_chunking"]
    assert (places["chunk_size"], places["input_tokens"]) == (4, len(states))
    assert [each["token_range"] for each in places["chunks"]][:2] == [[0, 4], [4, 8]]
    pieces = [TEXTS[0][slice(*each["char_range"])] for each in places["chunks"]]
    assert "".join(pieces) == TEXTS[0]
    assert reference.ids(pieces[0]) == reference.ids(TEXTS[0])[:4]
    [by_ids] = ask(url, input=reference.ids(TEXTS[0]), late_chunking_params={"chunk_size": 4}).json()["data"]
    assert by_ids["embedding"] == found["embedding"]
    assert {each["char_range"] for each in by_ids["late_chunking"]["chunks"]} == {None}


def test_the_list_of_models_tells_the_task_and_the_dimensions(url: str) -> None:
    [card] = httpx.get(f"{url}/v1/models").json()["data"]
    assert (card["task"], card["dimensions"]) == ("embed", 64)


def test_requests_are_counted_as_for_text(url: str) -> None:
    def value(name: str) -> float:
        lines = httpx.get(f"{url}/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))

    names = ("vllm:prompt_tokens_total", "vllm:e2e_request_latency_seconds_count", "vllm:request_success_total")
    before = [value(name) for name in names]
    tokens = ask(url, input=["one more text", "and another"]).json()["usage"]["prompt_tokens"]
    assert [value(name) - old for name, old in zip(names, before, strict=True)] == [tokens, 2, 2]
    assert value("vllm:num_requests_running") == 0


def test_a_client_that_hangs_up_ends_its_requests(url: str) -> None:
    inputs = [[5 + index % 200, *range(10, 70), index // 200] for index in range(4000)]
    body = json.dumps({"input": inputs}).encode()
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\n{JSON}Content-Length: {len(body)}\r\n\r\n".encode()
    with httpx.Client(base_url=url, timeout=60) as client:
        before = aborted(client)
        with socket.create_connection((client.base_url.host, client.base_url.port)) as raw:
            raw.sendall(head + body)
            while not sample(client, "vllm:num_requests_running"):
                time.sleep(0.01)
        wait_until_idle(client)
        assert aborted(client) > before


LONG = "a text of more than 64 tokens, " * 200


@pytest.mark.parametrize(
    ("path", "body", "flag"),
    [
        ("/classify", {"input": "a"}, "--convert classify"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "--runner generate"),
        ("/v1/completions", {"prompt": "a"}, "--runner generate"),
        (
            "/v1/messages",
            {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "a"}]},
            "--runner",
        ),
        ("/v1/responses", {"input": "a"}, "--runner generate"),
        # A conversation that cannot be rendered, here because it is too long, gets no other error.
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, "--runner generate"),
        (
            "/v1/messages",
            {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": LONG}]},
            "--runner",
        ),
        ("/v1/responses", {"input": LONG}, "--runner generate"),
        ("/generative_scoring", {"query": [5], "items": [[6]], "label_token_ids": [7]}, "--runner generate"),
    ],
)
def test_routes_of_other_tasks_say_which_the_model_has(url: str, path: str, body: dict[str, Any], flag: str) -> None:
    answer = httpx.post(url + path, json=body, timeout=60)
    assert answer.status_code == 400, answer.text
    assert "embed, token_embed" in answer.json()["error"]["message"]
    assert flag in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "a"}),
        ("/v2/embed", {"texts": ["a"]}),
        ("/pooling", {"input": "a"}),
        ("/classify", {"input": "a"}),
        ("/score", {"text_1": "a", "text_2": "b"}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/v2/rerank", {"query": "a", "documents": ["b"]}),
    ],
)
def test_a_model_that_generates_refuses_them(base_url: str, path: str, body: dict[str, Any]) -> None:
    answer = httpx.post(base_url + path, json=body, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
    assert "its task is generate" in answer.json()["error"]["message"]
    assert "--runner pooling --convert" in answer.json()["error"]["message"]


def test_prompts_by_name_are_for_other_protocols(url: str, reference: Reference) -> None:
    """As in vLLM, a checkpoint's prompts are not written here: clients of this API write them."""
    [found] = vectors_of(ask(url, input=PROMPTS["query"] + "a"))
    np.testing.assert_allclose(found, reference.vector("search: a"), atol=2e-6)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": LONG}, "input"),
        ("/v1/embeddings", {"input": ["a", "b", LONG]}, "input[2]"),
        ("/pooling", {"input": [[5], [5] * 65]}, "input[1]"),
        ("/score", {"queries": "a", "documents": ["b", "word " * 70]}, "documents[1]"),
        ("/score", {"queries": "word " * 70, "documents": ["b"]}, "queries"),
        ("/score", {"data_1": "word " * 70, "data_2": ["b"]}, "data_1"),
        ("/score", {"text_1": "a", "text_2": ["b", "word " * 70]}, "text_2[1]"),
        ("/rerank", {"query": "word " * 70, "documents": ["b"]}, "query"),
    ],
)
def test_a_long_text_is_named(url: str, path: str, body: dict[str, Any], param: str) -> None:
    answer = httpx.post(url + path, json=body, timeout=60)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
