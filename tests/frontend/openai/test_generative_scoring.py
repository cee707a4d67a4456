"""POST /generative_scoring against a real server: the probabilities are those of a completion."""

import math
from typing import Any

import httpx
import pytest

LABELS = [11, 12, 300]


def ask(base_url: str, **fields: Any) -> httpx.Response:
    body = {"query": [5, 6, 7], "items": [[8], [9, 10]], "label_token_ids": LABELS, **fields}
    return httpx.post(f"{base_url}/generative_scoring", json=body, timeout=60)


def probabilities(base_url: str, ids: list[int]) -> list[float]:
    sampling = {"max_tokens": 1, "logprob_token_ids": LABELS}
    body = {"token_ids": ids, "sampling_params": sampling}
    [choice] = httpx.post(f"{base_url}/inference/v1/generate", json=body, timeout=60).json()["choices"]
    found = {each["token_id"]: each["logprob"] for each in choice["logprobs"]["content"][0]["top_logprobs"]}
    return [math.exp(found[label]) for label in LABELS]


@pytest.mark.parametrize(
    ("fields", "prompts"),
    [({}, [[5, 6, 7, 8], [5, 6, 7, 9, 10]]), ({"item_first": True}, [[8, 5, 6, 7], [9, 10, 5, 6, 7]])],
)
def test_a_score_is_the_first_labels_probability(
    base_url: str, fields: dict[str, Any], prompts: list[list[int]]
) -> None:
    expected = [probabilities(base_url, ids) for ids in prompts]
    answer = ask(base_url, apply_softmax=False, **fields).json()
    assert [each["score"] for each in answer["data"]] == pytest.approx([each[0] for each in expected], rel=1e-5)
    answer = ask(base_url, request_id="mine", **fields).json()
    among = [each[0] / sum(each) for each in expected]
    assert [each["score"] for each in answer["data"]] == pytest.approx(among, rel=1e-5)
    assert [(each["index"], each["object"]) for each in answer["data"]] == [(0, "score"), (1, "score")]
    assert (answer["id"], answer["object"], answer["model"]) == ("generative-scoring-mine", "list", "tiny")
    assert answer["usage"]["prompt_tokens"] == 9
    assert answer["usage"]["completion_tokens"] == 2
    assert answer["usage"]["total_tokens"] == 11


def test_texts_become_tokens_by_themselves(base_url: str) -> None:
    def ids(text: str, special: bool) -> list[int]:
        body = {"prompt": text, "add_special_tokens": special}
        return httpx.post(f"{base_url}/tokenize", json=body).json()["tokens"]

    texts = ask(base_url, query="Is it", items=[" so?", ""]).json()
    tokens = ask(base_url, query=ids("Is it", True), items=[ids(" so?", False), []]).json()
    assert texts["data"] == tokens["data"]
    assert texts["usage"] == tokens["usage"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"label_token_ids": []}, "label_token_ids"),
        ({"label_token_ids": [10**6]}, "logprob_token_ids"),
        ({"items": []}, "items"),
        ({"items": [[8], "text"]}, "items"),
        ({"model": "other"}, "model"),
        ({"priority": 2**63}, "priority"),
    ],
)
def test_bad_fields_are_named(base_url: str, fields: dict[str, Any], param: str) -> None:
    answer = ask(base_url, **fields)
    assert answer.status_code == (404 if param == "model" else 400)
    assert param in (answer.json()["error"]["param"] or "") or param in answer.json()["error"]["message"]
