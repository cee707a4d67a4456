"""The routes of Text Embeddings Inference: values are Transformers', bodies and statuses are those of its document."""

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from tests.checkpoints import make_tokenizer
from tests.executor.models.tiny_encoders import write_encoder
from tests.frontend.pooling.test_embeddings import TEXTS, Reference
from tests.frontend.pooling.test_scores import DOCUMENTS, QUERY, Classifier
from tests.servers import ServerProcess
from tests.vector_servers import LABELS


@pytest.fixture(scope="module")
def embedder(embedding_checkpoint: Path) -> Reference:
    return Reference(embedding_checkpoint)


def ask(server: ServerProcess, path: str, **fields: Any) -> httpx.Response:
    return httpx.post(server.base_url + path, json=fields, timeout=60)


@pytest.mark.parametrize("path", ["/embed", "/", "/invocations"])
def test_vectors(embedding_server: ServerProcess, embedder: Reference, path: str) -> None:
    expected = [embedder.vector(text) for text in TEXTS]
    np.testing.assert_allclose(ask(embedding_server, path, inputs=TEXTS).json(), expected, atol=2e-6)
    np.testing.assert_allclose(ask(embedding_server, path, inputs=TEXTS[0]).json(), expected[:1], atol=2e-6)
    ids = [embedder.ids(text) for text in TEXTS]
    np.testing.assert_allclose(ask(embedding_server, path, inputs=ids).json(), expected, atol=2e-6)
    np.testing.assert_allclose(ask(embedding_server, path, inputs=ids[0]).json(), expected[:1], atol=2e-6)


def test_options_of_vectors(embedding_server: ServerProcess, embedder: Reference) -> None:
    raw = ask(embedding_server, "/embed", inputs=TEXTS[0], normalize=False).json()
    states = embedder.states(embedder.ids(TEXTS[0]))
    np.testing.assert_allclose(raw, [states.mean(0)], atol=2e-5)
    named = ask(embedding_server, "/embed", inputs="a", prompt_name="query").json()
    np.testing.assert_allclose(named, [embedder.vector("search: a")], atol=2e-6)
    assert len(ask(embedding_server, "/embed", inputs="a", dimensions=16).json()[0]) == 16
    long = [*range(5, 105)]
    for direction, kept in (("right", long[:64]), ("Left", long[-64:]), (None, long[:64])):
        cut = ask(embedding_server, "/embed", inputs=long, truncate=True, truncation_direction=direction).json()
        np.testing.assert_allclose(cut, [embedder.vector(kept)], atol=2e-6)
    [tokens] = ask(embedding_server, "/embed_all", inputs=TEXTS[0]).json()
    np.testing.assert_allclose(tokens, states, atol=2e-5)
    sparse = ask(embedding_server, "/embed_sparse", inputs=TEXTS[0])
    assert (sparse.status_code, sparse.json()["error_type"]) == (424, "Backend")
    assert "its pooling is MEAN" in sparse.json()["error"]


def test_headers_tell_what_an_answer_took(embedding_server: ServerProcess, embedder: Reference) -> None:
    answer = ask(embedding_server, "/embed", inputs=[*TEXTS, TEXTS[0]])
    given = [*TEXTS, TEXTS[0]]
    assert int(answer.headers["x-compute-characters"]) == sum(map(len, given))
    assert int(answer.headers["x-compute-tokens"]) == sum(len(embedder.ids(text)) for text in given)
    assert answer.headers["x-compute-type"] == "cpu"
    parts = [int(answer.headers[f"x-{part}-time"]) for part in ("tokenization", "queue", "inference")]
    assert 0 <= sum(parts) <= int(answer.headers["x-total-time"]) + 3  # each is rounded down


def test_texts_as_tokens_and_back(embedding_server: ServerProcess, embedder: Reference) -> None:
    """Places are those of bytes, as in its own tests."""
    text = "Ein Schluß: 一 quire"
    [found] = ask(embedding_server, "/tokenize", inputs=text).json()
    assert [each["id"] for each in found] == embedder.ids(text)
    raw = text.encode()
    assert [raw[each["start"] : each["stop"]].decode() for each in found] == [each["text"] for each in found]
    assert (found[0]["start"], found[-1]["stop"]) == (0, len(raw))
    assert not any(each["special"] for each in found)
    named = ask(embedding_server, "/tokenize", inputs=["a", "b"], prompt_name="query").json()
    assert [[each["id"] for each in row] for row in named] == [embedder.ids("search: a"), embedder.ids("search: b")]
    ids = [each["id"] for each in found]
    assert ask(embedding_server, "/decode", ids=ids).json() == [text]
    assert ask(embedding_server, "/decode", ids=[ids, ids[:1]]).json()[0] == text


def test_vertex_asks_many_at_once(embedding_server: ServerProcess, embedder: Reference) -> None:
    bodies = [{"inputs": TEXTS[0]}, {"inputs": TEXTS}]
    answers = ask(embedding_server, "/vertex", instances=bodies).json()["predictions"]
    np.testing.assert_allclose(answers[0], [embedder.vector(TEXTS[0])], atol=2e-6)
    np.testing.assert_allclose(answers[1], [embedder.vector(text) for text in TEXTS], atol=2e-6)
    assert ask(embedding_server, "/vertex", instances=[]).json() == {"predictions": []}
    wrong = ask(embedding_server, "/vertex", instances=[bodies[0], {"inputs": []}])
    assert (wrong.status_code, wrong.json()["error_type"]) == (400, "Empty")


def test_sparse_vectors(tmp_path: Path) -> None:
    """Of SPLADE's kind, as a checkpoint of sentence-transformers says it."""
    folder = tmp_path / "model"
    reference = write_encoder(folder, "bert", "ForMaskedLM", vocab_size=384)
    make_tokenizer(384, 128).save_pretrained(folder)
    kinds = {"": "models.MLMTransformer", "1_SpladePooling": "models.SpladePooling"}
    modules = [{"path": path, "type": f"sentence_transformers.sparse_encoder.{kind}"} for path, kind in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_SpladePooling").mkdir()
    (folder / "1_SpladePooling/config.json").write_text(json.dumps({"pooling_strategy": "max"}))
    ids = AutoTokenizer.from_pretrained(folder)(TEXTS[0])["input_ids"]
    with torch.inference_mode():
        weights = torch.log1p(torch.relu(reference(input_ids=torch.tensor([ids])).logits[0])).amax(0).numpy()
    server = ServerProcess(tmp_path, str(folder), "--device", "cpu").wait_until_ready()
    try:
        [found] = ask(server, "/embed_sparse", inputs=TEXTS[0]).json()
        assert ask(server, "/", inputs=TEXTS[0]).json() == [found]
        assert [each["index"] for each in found] == weights.nonzero()[0].tolist()
        np.testing.assert_allclose([each["value"] for each in found], weights[weights > 0], atol=1e-5)
        assert httpx.get(f"{server.base_url}/info").json()["model_type"] == {"embedding": {"pooling": "splade"}}
    finally:
        server.stop()


def test_similarity(embedding_server: ServerProcess, embedder: Reference) -> None:
    body = {"source_sentence": QUERY, "sentences": DOCUMENTS}
    expected = [float(embedder.vector(QUERY) @ embedder.vector(text)) for text in DOCUMENTS]
    assert ask(embedding_server, "/similarity", inputs=body).json() == pytest.approx(expected, abs=1e-5)
    named = ask(embedding_server, "/similarity", inputs=body, parameters={"prompt_name": "document"}).json()
    source = embedder.vector("text: " + QUERY)
    assert named == pytest.approx([float(source @ embedder.vector("text: " + text)) for text in DOCUMENTS], abs=1e-5)


def test_labels(labelling_server: ServerProcess, labelling_checkpoint: Path) -> None:
    reference = Classifier(labelling_checkpoint)

    def expected(*texts: str) -> list[tuple[str, float]]:
        odds = np.exp(reference.logits(*texts))
        return sorted(zip(LABELS, (odds / odds.sum()).tolist(), strict=True), key=lambda each: -each[1])

    def check(found: list[dict[str, Any]], *texts: str) -> None:
        labels, scores = zip(*expected(*texts), strict=True)
        assert [each["label"] for each in found] == [*labels]
        assert [each["score"] for each in found] == pytest.approx(scores, abs=1e-5)

    check(ask(labelling_server, "/predict", inputs="Hello").json(), "Hello")
    check(ask(labelling_server, "/", inputs="Hello").json(), "Hello")
    check(ask(labelling_server, "/predict", inputs=["Hello", "there"]).json(), "Hello", "there")
    batch = ask(labelling_server, "/predict", inputs=[["Hello"], ["Hello", "there"], ["Paris"]]).json()
    for found, texts in zip(batch, [["Hello"], ["Hello", "there"], ["Paris"]], strict=True):
        check(found, *texts)
    raw = ask(labelling_server, "/predict", inputs="Hello", raw_scores=True).json()
    assert [each["score"] for each in raw] == pytest.approx(sorted(reference.logits("Hello"), reverse=True), abs=1e-5)


@pytest.mark.parametrize("path", ["/rerank", "/", "/invocations"])
def test_ranks(ranking_server: ServerProcess, ranking_checkpoint: Path, path: str) -> None:
    reference = Classifier(ranking_checkpoint)
    scores = [reference.score(QUERY, text) for text in DOCUMENTS]
    ranks = ask(ranking_server, path, query=QUERY, texts=DOCUMENTS).json()
    assert [each["index"] for each in ranks] == np.argsort([-score for score in scores]).tolist()
    assert [each["score"] for each in ranks] == pytest.approx(sorted(scores, reverse=True), abs=1e-5)
    assert not any("text" in each for each in ranks)
    told = ask(ranking_server, path, query=QUERY, texts=DOCUMENTS, return_text=True, raw_scores=True).json()
    assert [each["text"] for each in told] == [DOCUMENTS[each["index"]] for each in ranks]
    raw = [float(reference.logits(QUERY, DOCUMENTS[each["index"]])[0]) for each in told]
    assert [each["score"] for each in told] == pytest.approx(raw, abs=1e-5)


def test_info(embedding_server: ServerProcess, ranking_server: ServerProcess, labelling_server: ServerProcess) -> None:
    info = httpx.get(f"{embedding_server.base_url}/info").json()
    assert (info["served_model_name"], info["model_dtype"], info["max_input_length"]) == ("tiny", "float32", 64)
    assert Path(info["model_id"]).is_dir()
    assert info["model_type"] == {"embedding": {"pooling": "mean"}}
    kind = httpx.get(f"{labelling_server.base_url}/info").json()["model_type"]["classifier"]
    assert kind["id2label"] == {str(index): label for index, label in enumerate(LABELS)}
    assert kind["label2id"] == {label: index for index, label in enumerate(LABELS)}
    assert list(httpx.get(f"{ranking_server.base_url}/info").json()["model_type"]) == ["reranker"]


@pytest.mark.parametrize(
    ("path", "fields", "status", "kind", "words"),
    [
        ("/embed", {"inputs": [5] * 65}, 413, "Validation", "64"),
        ("/embed", {"inputs": "word " * 100}, 413, "Validation", "truncate"),
        ("/embed", {"inputs": [[5]] * 16385}, 413, "Validation", "16384"),
        ("/embed", {"inputs": []}, 400, "Empty", "empty"),
        ("/embed", {"inputs": ""}, 400, "Empty", "empty"),
        ("/embed", {}, 422, "Validation", "inputs"),
        ("/embed", {"inputs": "a", "prompt_name": "nothing"}, 422, "Validation", "query, document"),
        ("/embed", {"inputs": "a", "truncation_direction": "up"}, 422, "Validation", "truncation_direction"),
        ("/predict", {"inputs": "a"}, 424, "Backend", "does not classify"),
        ("/rerank", {"query": "a", "texts": ["b"]}, 424, "Backend", "no reranker"),
        ("/rerank", {"query": "a", "texts": []}, 400, "Empty", "texts"),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": []}}, 400, "Empty", "sentences"),
        ("/tokenize", {"inputs": []}, 400, "Empty", "inputs"),
        ("/tokenize", {"inputs": 5}, 422, "Validation", "inputs"),
        ("/decode", {"ids": []}, 400, "Empty", "ids"),
        ("/decode", {"ids": [5, [6]]}, 422, "Validation", "mixture"),
        ("/decode", {"ids": [10**9]}, 422, "Validation", "1000000000"),
        ("/decode", {"ids": [-1]}, 422, "Validation", "-1"),
        ("/vertex", {"instances": ["a"]}, 422, "Validation", "object"),
    ],
)
def test_errors_have_its_shape(
    embedding_server: ServerProcess, path: str, fields: dict[str, Any], status: int, kind: str, words: str
) -> None:
    answer = ask(embedding_server, path, **fields)
    assert (answer.status_code, answer.json()["error_type"]) == (status, kind), answer.text
    assert words in answer.json()["error"]
    assert set(answer.json()) == {"error", "error_type"}


@pytest.mark.parametrize("path", ["/embed", "/embed_all", "/embed_sparse", "/predict"])
def test_a_model_that_generates_refuses_them(server: ServerProcess, path: str) -> None:
    answer = ask(server, path, inputs="a")
    assert (answer.status_code, answer.json()["error_type"]) == (424, "Backend")
    assert "--runner pooling" in answer.json()["error"]
    assert httpx.get(f"{server.base_url}/info").status_code == 424
