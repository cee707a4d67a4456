"""POST /score, /rerank and /classify against real servers: the values are Transformers'."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.frontend.pooling.test_embeddings import Reference
from tests.servers import ServerProcess
from tests.vector_servers import LABELS, serve

QUERY = "What is a quire?"
DOCUMENTS = ["A quire is a gathering of pages.", "The fox jumps.", "Paris is the capital of France."]


class Classifier:
    """The model in Transformers, and its tokenizer."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)

    def logits(self, *texts: str, **options: Any) -> np.ndarray:
        """Those of a text, or of a pair in the tokenizer's form; `options` are the tokenizer's."""
        with torch.inference_mode():
            return self._model(**self.tokenizer(*texts, return_tensors="pt", **options)).logits[0].numpy()

    def score(self, *texts: str, **options: Any) -> float:
        return 1 / (1 + math.exp(-float(self.logits(*texts, **options)[0])))


@pytest.fixture(scope="module")
def ranker(ranking_checkpoint: Path) -> Classifier:
    return Classifier(ranking_checkpoint)


@pytest.fixture(scope="module")
def embedder(embedding_checkpoint: Path) -> Reference:
    return Reference(embedding_checkpoint)


def ask(server: ServerProcess, path: str, **fields: Any) -> httpx.Response:
    return httpx.post(server.base_url + path, json=fields, timeout=60)


def scores_of(answer: httpx.Response) -> list[float]:
    answer.raise_for_status()
    assert [each["index"] for each in answer.json()["data"]] == list(range(len(answer.json()["data"])))
    return [each["score"] for each in answer.json()["data"]]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_a_model_with_one_class_reads_both_texts(ranking_server: ServerProcess, ranker: Classifier, path: str) -> None:
    expected = [ranker.score(QUERY, document) for document in DOCUMENTS]
    answer = ask(ranking_server, path, text_1=QUERY, text_2=DOCUMENTS)
    assert scores_of(answer) == pytest.approx(expected, abs=1e-5)
    body = answer.json()
    num_tokens = sum(len(ranker.tokenizer(QUERY, document)["input_ids"]) for document in DOCUMENTS)
    assert (body["object"], body["data"][0]["object"], body["usage"]["prompt_tokens"]) == ("list", "score", num_tokens)
    raw = scores_of(ask(ranking_server, path, queries=QUERY, documents=DOCUMENTS, use_activation=False))
    assert raw == pytest.approx([float(ranker.logits(QUERY, document)[0]) for document in DOCUMENTS], abs=1e-5)
    pairs = scores_of(ask(ranking_server, path, data_1=DOCUMENTS, data_2=DOCUMENTS))
    assert pairs == pytest.approx([ranker.score(document, document) for document in DOCUMENTS], abs=1e-5)
    objects = scores_of(ask(ranking_server, path, queries={"content": [{"type": "text", "text": QUERY}]}, items="The"))
    assert objects == pytest.approx([ranker.score(QUERY, "The")], abs=1e-5)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_ranks_in_the_form_of_jina_and_cohere(ranking_server: ServerProcess, ranker: Classifier, path: str) -> None:
    expected = sorted(
        ((ranker.score(QUERY, document), index) for index, document in enumerate(DOCUMENTS)), reverse=True
    )
    body = ask(ranking_server, path, model="tiny", query=QUERY, documents=DOCUMENTS).raise_for_status().json()
    assert [each["index"] for each in body["results"]] == [index for _, index in expected]
    assert [each["relevance_score"] for each in body["results"]] == pytest.approx(
        [each for each, _ in expected], abs=1e-5
    )
    for each in body["results"]:
        assert each["document"] == {"text": DOCUMENTS[each["index"]], "multi_modal": None}
    assert (body["model"], set(body["usage"])) == ("tiny", {"prompt_tokens", "total_tokens"})
    best = ask(ranking_server, path, query=QUERY, documents=DOCUMENTS, top_n=1, return_documents=False).json()[
        "results"
    ]
    assert [(each["index"], "document" in each) for each in best] == [(expected[0][1], False)]
    objects = ask(ranking_server, path, query=QUERY, documents=[{"text": each} for each in DOCUMENTS]).json()
    assert objects["results"] == body["results"]


def test_either_text_is_cut(ranking_server: ServerProcess, ranker: Classifier) -> None:
    def first(text: str, count: int) -> str:
        ends = ranker.tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
        return text[: ends[count - 1][1]]

    limits = {"max_tokens_per_query": 2, "max_tokens_per_doc": 4}
    [score] = scores_of(ask(ranking_server, "/score", text_1=QUERY, text_2=DOCUMENTS[0], **limits))
    assert score == pytest.approx(ranker.score(first(QUERY, 2), first(DOCUMENTS[0], 4)), abs=1e-5)
    [whole] = scores_of(ask(ranking_server, "/score", text_1=QUERY, text_2=DOCUMENTS[0], truncate_prompt_tokens=5))
    cut = {"truncation": True, "max_length": 5}
    assert whole == pytest.approx(ranker.score(QUERY, DOCUMENTS[0], **cut), abs=1e-5)


@pytest.fixture(scope="module")
def templated_server(ranking_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{{ instruction | default('Judge') }}: yes or no?"
    )
    yield from serve(tmp_path_factory.mktemp("templated"), ranking_checkpoint, "--chat-template", template)


def test_a_template_writes_the_pair(templated_server: ServerProcess, ranker: Classifier) -> None:
    def written(query: str, document: str, instruction: str = "Judge") -> str:
        return f"<query>{query}<document>{document}{instruction}: yes or no?"

    [score] = scores_of(ask(templated_server, "/score", text_1=QUERY, text_2="The fox"))
    assert score == pytest.approx(ranker.score(written(QUERY, "The fox")), abs=1e-5)
    for fields in ({"instruction": "Say"}, {"chat_template_kwargs": {"instruction": "Say"}}):
        [score] = scores_of(ask(templated_server, "/score", text_1=QUERY, text_2="The fox", **fields))
        assert score == pytest.approx(ranker.score(written(QUERY, "The fox", "Say")), abs=1e-5)
    [score] = scores_of(ask(templated_server, "/score", text_1=QUERY, text_2=DOCUMENTS[0], max_tokens_per_doc=3))
    ends = ranker.tokenizer(DOCUMENTS[0], return_offsets_mapping=True)["offset_mapping"]
    assert score == pytest.approx(ranker.score(written(QUERY, DOCUMENTS[0][: ends[2][1]])), abs=1e-5)
    refused = ask(templated_server, "/score", text_1="a", text_2="b", chat_template_kwargs={"tools": []})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "chat_template_kwargs")


def test_an_embedder_compares_vectors(embedding_server: ServerProcess, embedder: Reference) -> None:
    query, *documents = (embedder.vector(text) for text in (QUERY, *DOCUMENTS))
    answer = ask(embedding_server, "/score", text_1=QUERY, text_2=DOCUMENTS)
    assert scores_of(answer) == pytest.approx([float(query @ each) for each in documents], abs=1e-5)
    num_tokens = sum(len(embedder.ids(text)) for text in (QUERY, *DOCUMENTS))
    assert answer.json()["usage"]["total_tokens"] == num_tokens
    ranks = ask(embedding_server, "/v1/rerank", query=QUERY, documents=DOCUMENTS).json()["results"]
    assert [each["index"] for each in ranks] == np.argsort([-query @ each for each in documents]).tolist()
    cut = scores_of(ask(embedding_server, "/score", text_1=QUERY, text_2=DOCUMENTS, max_tokens_per_doc=2))
    short = [embedder.vector(embedder.ids(text)[:2]) for text in DOCUMENTS]
    assert cut == pytest.approx([float(query @ each) for each in short], abs=1e-5)


@pytest.fixture(scope="module")
def token_server(embedding_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    options = ("--pooler-config", '{"task": "token_embed"}')
    yield from serve(tmp_path_factory.mktemp("tokens"), embedding_checkpoint, *options)


def test_token_vectors_are_compared_by_their_largest_products(token_server: ServerProcess, embedder: Reference) -> None:
    def rows(text: str) -> np.ndarray:
        states = embedder.states(embedder.ids(text))
        return states / np.linalg.norm(states, axis=1, keepdims=True)

    expected = [float((rows(QUERY) @ rows(document).T).max(1).sum()) for document in DOCUMENTS]
    assert scores_of(ask(token_server, "/score", text_1=QUERY, text_2=DOCUMENTS)) == pytest.approx(expected, rel=1e-5)
    [matrix] = ask(token_server, "/v1/embeddings", input=QUERY).json()["data"]
    np.testing.assert_allclose(matrix["embedding"], rows(QUERY), atol=2e-6)
    refused = ask(token_server, "/v1/embeddings", input=QUERY, encoding_format="base64")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "encoding_format")


def test_labels_and_their_probabilities(labelling_server: ServerProcess, labelling_checkpoint: Path) -> None:
    reference = Classifier(labelling_checkpoint)
    body = ask(labelling_server, "/classify", input=DOCUMENTS).raise_for_status().json()
    for index, (found, text) in enumerate(zip(body["data"], DOCUMENTS, strict=True)):
        odds = np.exp(reference.logits(text))
        np.testing.assert_allclose(found["probs"], odds / odds.sum(), atol=1e-5)
        assert (found["index"], found["num_classes"]) == (index, 3)
        assert found["label"] == LABELS[int(odds.argmax())]
    raw = ask(labelling_server, "/classify", input=DOCUMENTS[0], use_activation=False).json()["data"][0]["probs"]
    np.testing.assert_allclose(raw, reference.logits(DOCUMENTS[0]), atol=1e-5)
    talk = [{"role": "user", "content": "Hello"}]
    rendered = reference.tokenizer.apply_chat_template(talk, tokenize=False)
    logits = ask(labelling_server, "/classify", messages=talk, use_activation=False).json()["data"][0]["probs"]
    np.testing.assert_allclose(logits, reference.logits(rendered), atol=1e-5)
    refused = ask(labelling_server, "/score", text_1="a", text_2="b")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
    assert "3 classes" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        ("/score", {}, "queries", "two sides"),
        ("/score", {"text_1": "a"}, "queries", "text_1"),
        ("/score", {"text_1": "a", "documents": "b"}, "queries", "documents, text_1"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1", "one and many"),
        ("/score", {"text_1": [], "text_2": ["c"]}, "text_1", "empty"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2", "empty"),
        ("/score", {"text_1": "a", "text_2": {"content": [{"type": "image_url"}]}}, "text_2", "text only"),
        ("/score", {"text_1": "a", "text_2": "b", "max_tokens_per_doc": 64}, "max_tokens_per_doc", "63"),
        ("/score", {"text_1": "a", "text_2": "b", "max_tokens_per_query": -1}, "max_tokens_per_query", "63"),
        ("/rerank", {"documents": ["a"]}, "query", "required"),
        ("/rerank", {"query": "a"}, "documents", "required"),
        ("/rerank", {"query": "a", "documents": []}, "documents", "empty"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "at least 0"),
        ("/rerank", {"query": "a", "documents": ["b", {"title": "c"}]}, "documents[1]", "text only"),
    ],
)
def test_bad_fields_are_named(
    ranking_server: ServerProcess, path: str, fields: dict[str, Any], param: str, words: str
) -> None:
    answer = ask(ranking_server, path, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert words in error["message"]
