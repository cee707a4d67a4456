"""POST /v2/embed in Cohere's form against a real server."""

import base64
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.frontend.pooling.test_embeddings import TEXTS, Reference
from tests.servers import ServerProcess


@pytest.fixture(scope="module")
def reference(embedding_checkpoint: Path) -> Reference:
    return Reference(embedding_checkpoint)


def ask(server: ServerProcess, **fields: Any) -> httpx.Response:
    return httpx.post(f"{server.base_url}/v2/embed", json=fields, timeout=60)


def test_each_form_of_vectors(embedding_server: ServerProcess, reference: Reference) -> None:
    types = ["float", "base64", "binary", "ubinary"]
    body = ask(embedding_server, model="tiny", texts=TEXTS, embedding_types=types).raise_for_status().json()
    vectors = np.array(body["embeddings"]["float"], np.float32)
    np.testing.assert_allclose(vectors, [reference.vector(text) for text in TEXTS], atol=2e-6)
    for text, vector in zip(body["embeddings"]["base64"], vectors, strict=True):
        np.testing.assert_array_equal(np.frombuffer(base64.b64decode(text), "<f4"), vector)
    bits = np.packbits(vectors >= 0, axis=1)
    assert body["embeddings"]["ubinary"] == bits.tolist()
    assert body["embeddings"]["binary"] == (bits.astype(int) - 128).tolist()
    assert (body["response_type"], body["texts"]) == ("embeddings_by_type", TEXTS)
    num_tokens = sum(len(reference.ids(text)) for text in TEXTS)
    assert body["meta"] == {
        "api_version": {"version": "2"},
        "billed_units": {"input_tokens": num_tokens, "image_tokens": 0},
    }
    assert list(ask(embedding_server, texts=["a"]).json()["embeddings"]) == ["float"]


def test_inputs_in_parts_and_prompts_by_type(embedding_server: ServerProcess, reference: Reference) -> None:
    parts = [{"content": [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]}]
    body = ask(embedding_server, inputs=parts).json()
    np.testing.assert_allclose(body["embeddings"]["float"], [reference.vector("Hello there")], atol=2e-6)
    assert "texts" not in body
    for kind, before in (("query", "search: "), ("search_query", "search: "), ("search_document", "text: ")):
        found = ask(embedding_server, texts=["a"], input_type=kind).json()["embeddings"]["float"]
        np.testing.assert_allclose(found, [reference.vector(before + "a")], atol=2e-6)


def test_truncation(embedding_server: ServerProcess, reference: Reference) -> None:
    ids = reference.ids(TEXTS[0])
    for fields, kept in (
        ({"max_tokens": 3}, ids[:3]),
        ({"max_tokens": 3, "truncate": "START"}, ids[-3:]),
        ({"truncate": "NONE"}, ids),
    ):
        [found] = ask(embedding_server, texts=[TEXTS[0]], **fields).json()["embeddings"]["float"]
        np.testing.assert_allclose(found, reference.vector(kept), atol=2e-6)
    assert ask(embedding_server, texts=["word " * 100]).json()["meta"]["billed_units"]["input_tokens"] == 64


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "texts"),
        ({"texts": []}, "texts"),
        ({"texts": ["a"], "inputs": [{"content": [{"type": "text", "text": "b"}]}]}, "texts"),
        ({"images": ["data:"]}, "images"),
        ({"inputs": [{"content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]}, "inputs"),
        ({"texts": ["a"], "input_type": "nothing"}, "input_type"),
        ({"texts": ["a"], "input_type": "clustering"}, "input_type"),
        ({"texts": ["a"], "embedding_types": ["int8"]}, "embedding_types[0]"),
        ({"texts": ["a"], "output_dimension": 17}, "output_dimension"),
        ({"texts": ["a b c d e"], "truncate": "NONE", "max_tokens": 2}, "max_tokens"),
        ({"texts": ["a"], "max_tokens": 0}, "max_tokens"),
        ({"texts": ["a"], "max_tokens": 10**6}, "max_tokens"),
        ({"texts": ["word " * 100], "truncate": "NONE"}, "texts"),
    ],
)
def test_bad_fields_are_named(embedding_server: ServerProcess, fields: dict[str, Any], param: str) -> None:
    answer = ask(embedding_server, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
