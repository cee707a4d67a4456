"""POST /inference/v1/generate against a real server: tokens in, tokens out."""

import json
from typing import Any

import httpx
import pytest

IDS = [5, 6, 7, 8, 9, 10]
GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}


def ask(base_url: str, **fields: Any) -> httpx.Response:
    body = {"token_ids": IDS, "sampling_params": GREEDY, **fields}
    return httpx.post(f"{base_url}/inference/v1/generate", json=body, timeout=60)


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    *lines, last = [line for line in answer.text.splitlines() if line]
    assert last == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_tokens_are_those_of_a_completion(base_url: str) -> None:
    body = {"prompt": IDS, **GREEDY, "return_token_ids": True}
    [expected] = httpx.post(f"{base_url}/v1/completions", json=body).json()["choices"]
    answer = ask(base_url, return_token_ids=True).json()
    assert answer["request_id"].startswith("generate-tokens-")
    assert answer["output_mode"] == "tokens"
    assert answer["prompt_token_ids"] == IDS
    assert answer["usage"]["completion_tokens"] == 6
    [choice] = answer["choices"]
    assert choice["token_ids"] == expected["token_ids"]
    assert choice["finish_reason"] == "length"
    assert "text" not in choice
    [choice] = ask(base_url, output_mode="text").json()["choices"]
    assert choice["text"] == expected["text"]


def test_a_stream_brings_the_same_in_parts(base_url: str) -> None:
    sampling = {**GREEDY, "temperature": 1, "seed": 3, "n": 2, "logprobs": 2, "max_tokens": 100}
    whole = ask(base_url, sampling_params=sampling).json()
    options = {"include_usage": True}
    parts = events(ask(base_url, sampling_params=sampling, stream=True, stream_options=options, return_token_ids=True))
    assert parts[0]["prompt_token_ids"] == IDS
    assert not [part for part in parts[1:] if "prompt_token_ids" in part]
    assert parts[-1]["choices"] == []
    assert parts[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        mine = [each for part in parts for each in part["choices"] if each["index"] == choice["index"]]
        assert len(mine) > 1
        assert [token for each in mine for token in each["token_ids"]] == choice["token_ids"]
        content = [entry for each in mine for entry in each["logprobs"]["content"]]
        assert [each["token_id"] for each in content] == choice["token_ids"]
        assert content == choice["logprobs"]["content"]
        assert all(each["top_logprobs"][0]["token_id"] == each["token_id"] for each in content)
        assert mine[-1]["finish_reason"] == "length"


def test_the_document_tells_both_forms_of_log_probabilities(base_url: str) -> None:
    document = httpx.get(f"{base_url}/openapi.json", timeout=60).json()
    schemas = document["components"]["schemas"]

    def properties(schema: dict[str, Any], *path: str) -> set[str]:
        for name in path:
            schema = schemas[schema["$ref"].rsplit("/", 1)[1]]["properties"][name]
            schema = next((each for each in schema.get("anyOf", []) if "$ref" in each), schema)
            schema = schema.get("items", schema)
        return set(schemas[schema["$ref"].rsplit("/", 1)[1]]["properties"])

    content = document["paths"]["/inference/v1/generate"]["post"]["responses"]["200"]["content"]
    forms = content["application/json"]["schema"]["anyOf"]
    told = [properties(form, "choices", "logprobs", "content") for form in forms]
    assert {"token_id", "logprob", "rank", "top_logprobs"} in told
    assert {"token", "logprob", "bytes", "top_logprobs"} in told
    for form, mode in zip(forms, ("tokens", "text"), strict=True):
        answer = ask(base_url, output_mode=mode, sampling_params={**GREEDY, "logprobs": 1}).json()
        entry = answer["choices"][0]["logprobs"]["content"][0]
        assert set(entry) == properties(form, "choices", "logprobs", "content")


def test_a_rendered_conversation_is_a_body(base_url: str) -> None:
    chat = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 16}
    expected = httpx.post(f"{base_url}/v1/chat/completions", json=chat, timeout=60).json()
    rendered = httpx.post(f"{base_url}/v1/chat/completions/render", json=chat).json()
    answer = httpx.post(f"{base_url}/inference/v1/generate", json={**rendered, "output_mode": "text"}, timeout=60)
    assert answer.json()["choices"][0]["text"] == expected["choices"][0]["message"]["content"]
    assert answer.json()["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]


def test_prompts_are_cut_as_they_are_rendered(base_url: str) -> None:
    """The last tokens stay, with their places in the text."""
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("chat/completions", {"messages": [{"role": "user", "content": "The quick brown fox jumps"}], "max_tokens": 4}),
        ("completions", {"prompt": "The quick brown fox jumps over the lazy dog", "add_special_tokens": False}),
    ]
    for route, body in bodies:
        url, body = f"{base_url}/v1/{route}/render", {**body, "return_token_offsets": True}
        [whole, last, first] = [
            httpx.post(url, json={**body, **fields}).json()
            for fields in (
                {},
                {"truncate_prompt_tokens": 3},
                {"truncate_prompt_tokens": 3, "truncation_side": "right"},
            )
        ]
        [whole, last, first] = [each[0] if isinstance(each, list) else each for each in (whole, last, first)]
        for name in ("token_ids", "token_offsets"):
            assert last[name] == whole[name][-3:]
            assert first[name] == whole[name][:3]
        answer = httpx.post(
            f"{base_url}/v1/{route}",
            json={**body, "truncate_prompt_tokens": 3, "return_token_offsets": False, "return_token_ids": True},
        )
        told = answer.json()
        assert (told.get("prompt_token_ids") or told["choices"][0]["prompt_token_ids"]) == last["token_ids"]


def test_without_max_tokens_an_answer_may_fill_the_context(base_url: str) -> None:
    answer = ask(base_url, token_ids=[5] * 2000, sampling_params={"ignore_eos": True, "temperature": 0}).json()
    assert answer["usage"]["completion_tokens"] == 48


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [10**7]}, None),
        ({"features": {"mm_hashes": {}}}, "features"),
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        ({"sampling_params": {"detokenize": False}, "output_mode": "text"}, "output_mode"),
        ({"sampling_params": {"top_p": 7}}, None),
        ({"model": "other"}, "model"),
    ],
)
def test_what_cannot_be_honoured_is_refused(base_url: str, fields: dict[str, Any], param: str | None) -> None:
    answer = ask(base_url, **fields)
    assert answer.status_code in (400, 404)
    assert param is None or answer.json()["error"]["param"] == param


@pytest.mark.parametrize("path", ["/inference/v1/generate", "/v1/completions"])
def test_requests_are_aborted_by_the_ids_of_their_answers(base_url: str, path: str) -> None:
    """By the id that the client chose, too, of requests for tokens."""
    is_generate = path == "/inference/v1/generate"
    many = {"temperature": 0, "max_tokens": 1500, "ignore_eos": True}
    body = {"token_ids": IDS, "sampling_params": many} if is_generate else {"prompt": IDS, **many}
    reason, ids = None, ["nobody"]
    url = base_url + path
    headers = {"X-Request-Id": "stop-me"}
    with httpx.stream("POST", url, json={**body, "stream": True}, headers=headers, timeout=60) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            part = json.loads(line.removeprefix("data: "))
            if ids == ["nobody"]:
                ids += ["stop-me"] if is_generate else [part["id"]]
                aborted = httpx.post(f"{base_url}/inference/v1/abort_requests", json={"request_ids": ids}, timeout=60)
                assert aborted.status_code == 200
                assert aborted.content == b""
            reason = part["choices"][0]["finish_reason"] if part["choices"] else reason
    assert reason == "abort"


def test_what_to_abort_must_be_told(base_url: str) -> None:
    for body in ({}, {"request_ids": "one"}):
        answer = httpx.post(f"{base_url}/inference/v1/abort_requests", json=body)
        assert answer.status_code == 400
        assert "request_ids" in answer.json()["error"]["message"]
