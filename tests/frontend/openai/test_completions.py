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


@pytest.mark.parametrize("n", [1, 2])
def test_tokens_of_split_characters_join_up_to_the_text(base_url: str, n: int) -> None:
    """The token that completes a character has it, the others before have none, and offsets point into the text."""
    body: dict[str, Any] = {
        "prompt": "日x",
        "echo": True,
        "logprobs": 2,
        "n": n,
        "max_tokens": 60,
        "return_token_ids": True,
        "structured_outputs": {"choice": ["語é🙂z"]},
    }
    answer = httpx.post(base_url + "/v1/completions", json=body, timeout=60).json()
    streamed: list[dict[str, list[Any]]] = [{"tokens": [], "text_offset": []} for _ in range(n)]
    for line in httpx.post(base_url + "/v1/completions", json={**body, "stream": True}, timeout=60).text.splitlines():
        for choice in json.loads(line.removeprefix("data: "))["choices"] if "{" in line else []:
            for name, values in streamed[choice["index"]].items():
                values += choice["logprobs"][name] if choice["logprobs"] else []
    for choice in answer["choices"]:
        columns = choice["logprobs"]
        texts = columns["tokens"][:-1]  # without the end of the output, which is no text
        assert choice["text"] == "日x語é🙂z" == "".join(texts)
        assert [text for text in texts if text] == list(choice["text"])
        assert len(columns["tokens"]) == len(choice["token_ids"]) + len(choice["prompt_token_ids"])
        for offset, token in zip(columns["text_offset"], texts, strict=False):
            assert choice["text"][offset:].startswith(token)
        assert streamed[choice["index"]] == {name: columns[name] for name in ("tokens", "text_offset")}


def test_tokens_of_split_characters_in_a_chat(base_url: str) -> None:
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "logprobs": True,
        "top_logprobs": 1,
        "max_tokens": 60,
        "structured_outputs": {"choice": ["語é"]},
    }
    choice = httpx.post(base_url + "/v1/chat/completions", json=body, timeout=60).json()["choices"][0]
    content = choice["logprobs"]["content"][:-1]  # without the end of the output
    assert "".join(entry["token"] for entry in content) == choice["message"]["content"] == "語é"
    assert [entry["token"] for entry in content if entry["token"]] == ["語", "é"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "語é"
    assert all(entry["bytes"] for entry in content)


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


def scores(base_url: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(base_url + "/v1/completions", json={"temperature": 0, "ignore_eos": True, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_echo_with_logprobs_scores_the_prompt(client: openai.OpenAI, base_url: str) -> None:
    plain = ask(client, "The quick", logprobs=1)
    both = ask(client, "The quick", logprobs=1, echo=True).choices[0]
    count = plain.usage.prompt_tokens
    columns = both.logprobs
    assert both.text == "The quick" + plain.choices[0].text
    assert (columns.token_logprobs[0], columns.top_logprobs[0]) == (None, None)
    assert columns.tokens[count:] == plain.choices[0].logprobs.tokens
    assert columns.token_logprobs[count:] == pytest.approx(plain.choices[0].logprobs.token_logprobs)
    assert "".join(columns.tokens[:count]) == "The quick"
    assert columns.text_offset[count] == len("The quick")
    for token, logprob, top in list(zip(columns.tokens, columns.token_logprobs, columns.top_logprobs, strict=True))[1:]:
        assert top[token] == logprob
    streamed: dict[str, list[Any]] = {"tokens": [], "text_offset": [], "token_logprobs": []}
    for chunk in ask(client, "The quick", logprobs=1, echo=True, stream=True):
        for name, values in streamed.items():
            values += getattr(chunk.choices[0].logprobs, name) if chunk.choices[0].logprobs else []
    assert streamed == {name: getattr(columns, name) for name in streamed}


def test_echo_alone_generates_nothing(base_url: str) -> None:
    body = {"prompt": "The quick", "max_tokens": 0, "echo": True, "logprobs": 1, "return_token_ids": True}
    answer = scores(base_url, **body)
    [choice] = answer["choices"]
    assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == ("The quick", [], "length")
    assert answer["usage"]["completion_tokens"] == 0
    assert len(choice["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"]
    events = httpx.post(base_url + "/v1/completions", json={**body, "n": 2, "stream": True}).text.split("\n\n")
    told = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events if event.startswith("data: {")]
    assert sorted(each["index"] for each in told) == [0, 1]
    assert all(each["logprobs"] == choice["logprobs"] and each["text"] == "The quick" for each in told)


def test_prompt_logprobs_by_token_id(base_url: str) -> None:
    answer = scores(base_url, prompt="The quick", max_tokens=1, prompt_logprobs=2, return_token_ids=True)
    [choice] = answer["choices"]
    first, *rows = choice["prompt_logprobs"]
    assert first is None
    for token_id, row in zip(choice["prompt_token_ids"][1:], rows, strict=True):
        own = row[str(token_id)]
        assert own["logprob"] <= 0
        assert len(row) == 2 + (own["rank"] > 2)
    body = {"messages": [{"role": "user", "content": "a"}], "prompt_logprobs": 0, "max_tokens": 1}
    chat = httpx.post(base_url + "/v1/chat/completions", json=body).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "asked"),
    [("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})],
)
def test_a_stream_may_ask_for_no_likeliest_tokens_of_the_prompt(base_url: str, path: str, asked: Any) -> None:
    """As vLLM has it: a stream has no place for them, so a number is refused."""
    body = {**asked, "max_tokens": 2, "stream": True}
    assert httpx.post(base_url + path, json={**body, "prompt_logprobs": 0}).text.endswith("data: [DONE]\n\n")
    for number in (1, -1):
        refused = httpx.post(base_url + path, json={**body, "prompt_logprobs": number})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")


def test_named_tokens_instead_of_the_likeliest(base_url: str) -> None:
    fields = {"max_tokens": 1, "logprob_token_ids": [40, 50], "return_tokens_as_token_ids": True}
    [choice] = scores(base_url, prompt="a", logprobs=2, **fields)["choices"]
    assert {"token_id:40", "token_id:50"} <= set(choice["logprobs"]["top_logprobs"][0])
    body = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, **fields}
    chat = httpx.post(base_url + "/v1/chat/completions", json=body).json()["choices"][0]
    assert {"token_id:40", "token_id:50"} <= {top["token"] for top in chat["logprobs"]["content"][0]["top_logprobs"]}


def test_prompts_are_cut_where_asked(base_url: str) -> None:
    ids = tokenize(base_url, "The quick brown fox jumps over the lazy dog")
    for fields, kept in (
        ({"truncate_prompt_tokens": 4}, ids[-4:]),
        ({"truncate_prompt_tokens": 4, "truncation_side": "left"}, ids[-4:]),
        ({"truncate_prompt_tokens": 4, "truncation_side": "right"}, ids[:4]),
        ({"truncate_prompt_tokens": -1}, ids),
    ):
        [choice] = scores(base_url, prompt=ids, max_tokens=1, return_token_ids=True, **fields)["choices"]
        assert choice["prompt_token_ids"] == kept
    long = ids * 400
    [choice] = scores(base_url, prompt=long, max_tokens=2, return_token_ids=True, truncate_prompt_tokens=-1)["choices"]
    assert choice["prompt_token_ids"] == long[2 - 2048 :]


def test_beams_are_choices(client: openai.OpenAI, base_url: str) -> None:
    extra = {"use_beam_search": True, "ignore_eos": True}
    answer = ask(client, "The quick", n=3, max_tokens=4, logprobs=1, extra=extra)
    totals = [sum(choice.logprobs.token_logprobs) for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert totals == sorted(totals, reverse=True)
    assert len({choice.text for choice in answer.choices}) == 3
    assert answer.usage.completion_tokens == 12
    streamed = [""] * 3
    for chunk in ask(client, "The quick", n=3, max_tokens=4, stream=True, extra=extra):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
            assert choice.logprobs is None, "nobody asked"
    assert streamed == [choice.text for choice in answer.choices]
    body = {"messages": [{"role": "user", "content": "a"}], "n": 2, "max_tokens": 3, **extra}
    chat = httpx.post(base_url + "/v1/chat/completions", json=body).json()
    assert len({choice["message"]["content"] for choice in chat["choices"]}) == 2
    assert [choice["logprobs"] for choice in chat["choices"]] == [None, None]
    scored = httpx.post(base_url + "/v1/chat/completions", json={**body, "logprobs": True}).json()
    assert [len(choice["logprobs"]["content"]) for choice in scored["choices"]] == [3, 3]


def test_a_stream_in_larger_portions(base_url: str) -> None:
    body = {"prompt": "a", "max_tokens": 60, "ignore_eos": True, "stream": True, "return_token_ids": True}
    text = httpx.post(base_url + "/v1/completions", json={**body, "stream_interval": 4}).text
    choices = [json.loads(event[6:])["choices"] for event in text.split("\n\n") if event.startswith("data: {")]
    sizes = [len(each[0]["token_ids"]) for each in choices if each]
    assert all(size >= 4 for size in sizes[1:-1])  # the first comes at once, the last whatever its size
    assert sum(sizes) == 60


def test_lists_of_tokens_reach_the_sampler(client: openai.OpenAI) -> None:
    ids = {"return_token_ids": True}
    choice = ask(client, "a", extra={"allowed_token_ids": [70, 71], **ids}).choices[0]
    assert set(choice.token_ids) <= {70, 71}
    choice = ask(client, "a", logit_bias={"70": 100}, extra=ids).choices[0]
    assert choice.token_ids == [70] * 8
    detection = {"max_pattern_size": 1, "min_count": 3}
    choice = ask(client, "a", logit_bias={"70": 100}, extra={"repetition_detection": detection, **ids}).choices[0]
    assert (choice.finish_reason, choice.token_ids) == ("repetition", [70] * 3)


def test_stop_token_ends_and_is_reported(client: openai.OpenAI) -> None:
    ids = ask(client, "a", extra={"return_token_ids": True}).choices[0].token_ids
    choice = ask(client, "a", extra={"stop_token_ids": [ids[4]], "return_token_ids": True}).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.stop_reason == ids[4]
    assert len(choice.token_ids) <= 5


def cache_counts(base_url: str) -> tuple[int, int]:
    """(tokens looked up in the prefix cache, tokens found) since the server started."""
    lines = httpx.get(base_url + "/metrics").text.splitlines()
    counts = [
        int(float(line.rsplit(" ", 1)[1]))
        for name in ("queries", "hits")
        for line in lines
        if line.startswith(f"vllm:prefix_cache_{name}_total{{")
    ]
    return counts[0], counts[1]


def test_cache_hits_of_a_repeated_prompt(client: openai.OpenAI, base_url: str) -> None:
    prompt = "a prompt that fills more than one page of the cache " * 3
    ask(client, prompt)
    _, before = cache_counts(base_url)
    ask(client, prompt)
    _, again = cache_counts(base_url)
    assert again > before
    ask(client, prompt, extra={"cache_salt": "mine"})
    assert cache_counts(base_url)[1] == again


@pytest.mark.parametrize(
    ("options", "num_requests"),
    [
        ({"n": 4, "temperature": 1}, 4),
        ({"n": 3, "extra": {"use_beam_search": True}, "max_tokens": 5}, 1 + 3 * 4),  # one token of each beam at a time
        ({"extra": {}}, 3),  # the same prompt three times in one request
    ],
    ids=["samples", "beams", "prompts"],
)
def test_the_pages_of_a_prompt_are_shared(
    client: openai.OpenAI, base_url: str, options: dict[str, Any], num_requests: int
) -> None:
    """The metrics count found pages: all requests after the first compute only the tokens that fill no page."""
    ids = [100 + i for i in range(100)]  # six pages of 16, and 4 tokens
    options["extra"] = {**options.get("extra", {}), "cache_salt": str(options)}  # nobody has been here
    queries, hits = cache_counts(base_url)
    ask(client, ids if "n" in options else [ids] * 3, **options)
    after = cache_counts(base_url)
    assert after[1] - hits == 96 * (num_requests - 1)
    assert after[0] - queries >= 100 * num_requests


@pytest.mark.parametrize(
    ("prompt", "options", "param"),
    [
        ([], {}, "prompt"),
        ("", {}, "prompt"),
        ([[]], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([10**6], {}, "prompt"),
        ([[1], [10**6]], {}, "prompt"),
        ("a", {"suffix": "b"}, "suffix"),
        ("a", {"best_of": 2}, "best_of"),
        ("a", {"max_tokens": 0}, "max_tokens"),
        ("a", {"extra": {"min_tokens": 9}}, "min_tokens"),
        ("a", {"extra": {"top_k": -2}}, "top_k"),
        ("a", {"extra": {"min_p": 2}}, "min_p"),
        ("a", {"extra": {"priority": 2**63}}, "priority"),
        ("a", {"extra": {"prompt_logprobs": 21}}, "prompt_logprobs"),
        ("a", {"logit_bias": {"5": 101}}, "logit_bias"),
        ("a", {"logit_bias": {"x": 1}}, "logit_bias"),
        ("a", {"logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias"),
        ("a", {"extra": {"allowed_token_ids": [10**6]}}, "allowed_token_ids"),
        ("a", {"extra": {"bad_words": [""]}}, "bad_words"),
        ("a", {"extra": {"truncate_prompt_tokens": 0}}, "truncate_prompt_tokens"),
        ("a", {"extra": {"truncate_prompt_tokens": 10**6}}, "truncate_prompt_tokens"),
        ("a", {"extra": {"vllm_xargs": {"a": 1}}}, "vllm_xargs"),
        ("a", {"extra": {"use_beam_search": True, "top_k": 3}}, "top_k"),
        ("a", {"extra": {"use_beam_search": True}, "temperature": 0.5}, "temperature"),
        ("a", {"extra": {"use_beam_search": True}, "n": 1000}, "n"),
        ("a", {"extra": {"thinking_token_budget": "x"}}, "thinking_token_budget"),
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


@pytest.mark.parametrize(
    ("path", "prompt"),
    [("completions", {"prompt": "a"}), ("chat/completions", {"messages": [{"role": "user", "content": "a"}]})],
)
@pytest.mark.parametrize("fields", [{"n": 2}, {"use_beam_search": True, "n": 2}])
def test_choices_say_which_weights_made_them(
    base_url: str, path: str, prompt: dict[str, Any], fields: dict[str, Any]
) -> None:
    """Whole, or in a choice's last chunk."""
    body = {**prompt, "model": "tiny", "max_tokens": 7, "ignore_eos": True, "return_weight_versions": True, **fields}
    expected = None if "use_beam_search" in fields else [{"version": "default", "start": 0, "end": 7}]
    answer = httpx.post(f"{base_url}/v1/{path}", json=body, timeout=60).json()
    assert [choice.get("weight_versions") for choice in answer["choices"]] == [expected] * 2
    told = []
    with httpx.stream("POST", f"{base_url}/v1/{path}", json={**body, "stream": True}, timeout=60) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                told += [choice for choice in json.loads(line[6:])["choices"] if "weight_versions" in choice]
    assert [choice["weight_versions"] for choice in told] == ([] if expected is None else [expected] * 2)
    assert all(choice["finish_reason"] for choice in told)
