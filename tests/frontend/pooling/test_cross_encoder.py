"""An encoder that reads pairs, asked in the form of each API; the scores are those of Transformers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import processors

from tests.checkpoints import make_tokenizer
from tests.executor.models.tiny_encoders import write_encoder
from tests.frontend.pooling.test_scores import DOCUMENTS, QUERY, Classifier
from tests.servers import ServerProcess


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cross") / "model"
    write_encoder(folder, "bert", "ForSequenceClassification", vocab_size=384, num_labels=1)
    tokenizer = make_tokenizer(384, 128)
    marks = {"cls_token": "<|im_start|>", "sep_token": "<|im_end|>"}
    tokenizer.add_special_tokens(marks)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>",
        pair="<|im_start|> $A <|im_end|> $B:1 <|im_end|>:1",
        special_tokens=[(mark, tokenizer.convert_tokens_to_ids(mark)) for mark in marks.values()],
    )
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"  # whose class of tokenizers gives no types by itself
    names = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | names))
    return folder


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path_factory.mktemp("server"), str(folder), "--device", "cpu", "--max-model-len", "64")
    yield server.wait_until_ready()
    server.stop()


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[float]:
    """The score of each document."""
    reference = Classifier(folder)
    assert 1 in reference.tokenizer(QUERY, DOCUMENTS[0])["token_type_ids"]
    return [reference.score(QUERY, document) for document in DOCUMENTS]


def ask(server: ServerProcess, path: str, **fields: Any) -> Any:
    return httpx.post(server.base_url + path, json=fields, timeout=60).raise_for_status().json()


@pytest.mark.parametrize("path", ["/score", "/invocations"])
def test_scores(server: ServerProcess, expected: list[float], path: str) -> None:
    for first, second in (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")):
        found = ask(server, path, **{first: QUERY, second: DOCUMENTS})["data"]
        assert [each["score"] for each in found] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank", "/invocations"])
def test_ranks_of_jina_and_cohere(server: ServerProcess, expected: list[float], path: str) -> None:
    found = ask(server, path, query=QUERY, documents=DOCUMENTS)["results"]
    assert {each["index"]: each["relevance_score"] for each in found} == pytest.approx(
        dict(enumerate(expected)), abs=1e-5
    )
    assert [each["relevance_score"] for each in found] == sorted(
        (each["relevance_score"] for each in found), reverse=True
    )


@pytest.mark.parametrize("path", ["/rerank", "/", "/invocations"])
def test_ranks_of_text_embeddings_inference(server: ServerProcess, expected: list[float], path: str) -> None:
    found = ask(server, path, query=QUERY, texts=DOCUMENTS)
    assert {each["index"]: each["score"] for each in found} == pytest.approx(dict(enumerate(expected)), abs=1e-5)
    batch = ask(server, "/predict", inputs=[[QUERY, document] for document in DOCUMENTS])
    assert [each[0]["score"] for each in batch] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/rerank", {"query": QUERY, "documents": ["a", "word " * 70]}, "documents[1]"),
        ("/score", {"text_1": QUERY, "text_2": ["a", "word " * 30]}, "text_2[1]"),
        ("/score", {"text_1": "word " * 70, "text_2": ["a", "b"]}, "text_1"),
        ("/score", {"queries": [QUERY, "word " * 62], "documents": ["a", "b"]}, "queries[1]"),
        ("/rerank", {"query": "word " * 62, "documents": ["a", "b"]}, "query"),
    ],
)
def test_a_long_text_is_named(server: ServerProcess, path: str, body: dict[str, Any], param: str) -> None:
    answer = httpx.post(server.base_url + path, json=body, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    if path == "/rerank":
        own = httpx.post(server.base_url + path, json={"query": body["query"], "texts": body["documents"]}, timeout=60)
        assert (own.status_code, own.json()["error_type"]) == (413, "Validation"), own.text
