"""The real OpenAI client against a real server: text completions."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest


@pytest.fixture(scope="module")
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, prompt: Any, **options: Any) -> Any:
    """A completion request for eight greedy tokens, unless `options` say otherwise."""
    extra = {"ignore_eos": True, **options.pop("extra", {})}
    return client.completions.create(
        **{"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, "extra_body": extra, **options}
    )


def tokenize(base_url: str, text: str) -> list[int]:
    return httpx.post(base_url + "/tokenize", json={"prompt": text}).json()["tokens"]


def test_answer_has_openai_shape(client: openai.OpenAI) -> None:
    answer = ask(client, "The quick")
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    [choice] = answer.choices
    assert choice.text
    assert choice.finish_reason == "length"
    assert choice.logprobs is None
    assert answer.usage.completion_tokens == 8


def test_default_is_16_tokens(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="a", extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_every_form_of_prompt(client: openai.OpenAI, base_url: str) -> None:
    one, two = "The quick", "brown fox"
    ids = [tokenize(base_url, one), tokenize(base_url, two)]
    first, second = (ask(client, prompt).choices[0].text for prompt in (one, two))
    assert ask(client, ids[0]).choices[0].text == first
    for prompts in ([one, two], ids):
        answer = ask(client, prompts)
        assert [choice.index for choice in answer.choices] == [0, 1]
        assert [choice.text for choice in answer.choices] == [first, second]
        assert answer.usage.prompt_tokens == len(ids[0]) + len(ids[1])
        assert answer.usage.completion_tokens == 16


def test_choices_are_numbered_through_prompts_and_n(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"n": 2, "temperature": 1.0, "seed": 3}
    whole = ask(client, ["a", "b"], **options)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    texts = [choice.text for choice in whole.choices]
    alone = [choice.text for prompt in ("a", "b") for choice in ask(client, prompt, **options).choices]
    assert texts == alone
    streamed = [""] * 4
    for chunk in ask(client, ["a", "b"], stream=True, **options):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts


def test_stream_ends_with_usage_and_done(base_url: str) -> None:
    body = {"prompt": "a", "max_tokens": 4, "ignore_eos": True, "stream": True}
    text = httpx.post(
        base_url + "/v1/completions", json={**body, "stream_options": {"include_usage": True}}
    ).text.removesuffix("\n\n")
    *chunks, usage, done = [frame.removeprefix("data: ") for frame in text.split("\n\n")]
    assert done == "[DONE]"
    assert json.loads(usage)["choices"] == []
    assert json.loads(usage)["usage"]["completion_tokens"] == 4
    last = json.loads(chunks[-1])["choices"][0]
    assert last["finish_reason"] == "length"
    assert set(last) == {"index", "text", "logprobs", "finish_reason", "stop_reason"}


def test_logprobs_come_in_columns(client: openai.OpenAI) -> None:
    choice = ask(client, "The quick", logprobs=2).choices[0]
    columns = choice.logprobs
    assert len(columns.tokens) == len(columns.token_logprobs) == len(columns.text_offset) == 8
    assert columns.text_offset[0] == 0
    lengths = [len(token) for token in columns.tokens]
    assert columns.text_offset == [sum(lengths[:i]) for i in range(8)]
    for token, logprob, top in zip(columns.tokens, columns.token_logprobs, columns.top_logprobs, strict=True):
        assert top[token] == pytest.approx(logprob)
        assert logprob == max(top.values())  # greedy
    streamed: dict[str, list[Any]] = {"tokens": [], "text_offset": []}
    for chunk in ask(client, "The quick", logprobs=2, stream=True):
        for name, values in streamed.items():
            values += getattr(chunk.choices[0].logprobs, name) if chunk.choices[0].logprobs else []
    assert streamed == {"tokens": columns.tokens, "text_offset": columns.text_offset}


def test_sampled_token_is_among_the_likeliest_even_when_it_is_not(client: openai.OpenAI) -> None:
    columns = ask(client, "a", logprobs=1, temperature=5.0, seed=1, max_tokens=20).choices[0].logprobs
    sizes = [len(top) for top in columns.top_logprobs]
    assert max(sizes) == 2
    columns = ask(client, "a", logprobs=0, temperature=5.0, seed=1).choices[0].logprobs
    assert [len(top) for top in columns.top_logprobs] == [1] * 8


def test_tokens_as_ids(client: openai.OpenAI) -> None:
    extra = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    choice = ask(client, "a", logprobs=1, extra=extra).choices[0]
    assert choice.logprobs.tokens == [f"token_id:{token_id}" for token_id in choice.token_ids]
    assert all(len(top) == 1 for top in choice.logprobs.top_logprobs)
    assert choice.prompt_token_ids


def test_echo_puts_the_prompt_first(client: openai.OpenAI, base_url: str) -> None:
    text = ask(client, "The quick").choices[0].text
    for prompt in ("The quick", tokenize(base_url, "The quick")):
        assert ask(client, prompt, echo=True).choices[0].text == "The quick" + text
        streamed = "".join(chunk.choices[0].text for chunk in ask(client, prompt, echo=True, stream=True))
        assert streamed == "The quick" + text


def test_stop_token_ends_and_is_reported(client: openai.OpenAI) -> None:
    ids = ask(client, "a", extra={"return_token_ids": True}).choices[0].token_ids
    choice = ask(client, "a", extra={"stop_token_ids": [ids[4]], "return_token_ids": True}).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.stop_reason == ids[4]
    assert len(choice.token_ids) <= 5


def test_cache_hits_of_a_repeated_prompt(client: openai.OpenAI, base_url: str) -> None:
    def hits() -> float:
        lines = httpx.get(base_url + "/metrics").text.splitlines()
        [line] = [line for line in lines if line.startswith("vllm:prefix_cache_hits_total{")]
        return float(line.rsplit(" ", 1)[1])

    prompt = "a prompt that fills more than one page of the cache " * 3
    ask(client, prompt)
    before = hits()
    ask(client, prompt)
    assert hits() > before
    again = hits()
    ask(client, prompt, extra={"cache_salt": "mine"})
    assert hits() == again


@pytest.mark.parametrize(
    ("prompt", "options", "param"),
    [
        ([], {}, "prompt"),
        ("", {}, "prompt"),
        ([[]], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([10**6], {}, "prompt"),
        ([[1], [10**6]], {}, "prompt"),
        ("a", {"echo": True, "logprobs": 1}, "echo"),
        ("a", {"suffix": "b"}, "suffix"),
        ("a", {"best_of": 2}, "best_of"),
        ("a", {"max_tokens": 0}, "max_tokens"),
        ("a", {"extra": {"min_tokens": 9}}, "min_tokens"),
        ("a", {"extra": {"top_k": -2}}, "top_k"),
        ("a", {"extra": {"min_p": 2}}, "min_p"),
        ("a", {"extra": {"priority": 2**63}}, "priority"),
        ("a", {"extra": {"prompt_logprobs": 1}}, "prompt_logprobs"),
        ("a", {"extra": {"stop_token_ids": [10**6]}}, "stop_token_ids"),
        ("a", {"stop": ""}, "stop"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_request_names_its_field(
    client: openai.OpenAI, prompt: Any, options: dict[str, Any], param: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, prompt, stream=stream, **options)
    assert caught.value.param == param


def test_mixed_prompts_and_missing_prompt(base_url: str) -> None:
    for body in ({"prompt": ["a", 1]}, {"prompt": [1, [2]]}, {}, {"prompt": None}):
        answer = httpx.post(base_url + "/v1/completions", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "prompt"
