"""What vLLM's own tests of chat and text completions require of an answer, asked of our server.

Here are those that no other test of ours asks. The names of the cases are vLLM's.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.servers import ServerProcess

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "what is 1+1?"}]}
TEXT: dict[str, Any] = {"prompt": [5, 6, 7]}
PATHS = {"chat": ("/v1/chat/completions", CHAT), "text": ("/v1/completions", TEXT)}
BOTH = ("chat", "text")
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}
]
NAMED: dict[str, Any] = {"type": "function", "function": {"name": "get_weather"}}
BAD_SCHEMA = {"type": "object", "properties": {"brand": {"type": "string"}, "foo": "bar"}}
SAYING = [{"role": "user", "content": "tell me a saying"}, {"role": "assistant", "content": "An apple a day"}]


@pytest.fixture(scope="module")
def named_server(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    names = ("--served-model-name", "tiny", "alias")
    server = ServerProcess(tmp_path_factory.mktemp("named"), str(checkpoint("llama")), *names).wait_until_ready()
    yield server
    server.stop()


def ask(base_url: str, endpoint: str, **fields: Any) -> httpx.Response:
    path, body = PATHS[endpoint]
    body = {"model": "tiny", "max_tokens": 5, "temperature": 0, **body, **fields}
    return httpx.post(base_url + path, json=body, timeout=60)


@pytest.mark.parametrize(
    ("endpoints", "fields", "words"),
    [
        pytest.param(BOTH, {"structured_outputs": {"json": BAD_SCHEMA}}, "", id="invalid_json_schema"),
        pytest.param(BOTH, {"structured_outputs": {"regex": "[.*"}}, "", id="invalid_regex"),
        pytest.param(BOTH, {"structured_outputs": {"grammar": "root ::= nothing"}}, "", id="invalid_grammar"),
        pytest.param(BOTH, {"structured_outputs": {"grammar": ""}}, "", id="empty_grammar"),
        pytest.param(BOTH, {"structured_outputs": {"regex": {"1": "C++"}}}, "", id="structured_outputs_type_error"),
        pytest.param(BOTH, {"structured_outputs": {"regex": "a", "json": {}}}, "", id="structured_outputs_count"),
        pytest.param(BOTH, {"response_format": {"type": "json_schema"}}, "json_schema", id="missing_schema"),
        pytest.param(BOTH, {"logit_bias": {"bad1": 1, "bad2": 2}}, "logit_bias bad1 bad2", id="non_integer_keys"),
        pytest.param(BOTH, {"logit_bias": {"1": "not_a_number"}}, "logit_bias", id="non_numeric_value"),
        pytest.param(BOTH, {"logit_bias": {"999999": 1}}, "999999", id="logit_bias_out_of_vocabulary"),
        pytest.param(BOTH, {"stop_token_ids": [999999]}, "999999", id="stop_token_ids_out_of_vocab"),
        pytest.param(BOTH, {"stop_token_ids": [-1]}, "", id="stop_token_ids_negative"),
        pytest.param(BOTH, {"thinking_token_budget": -2}, "thinking_token_budget", id="thinking_token_budget"),
        pytest.param(BOTH, {"thinking_token_budget": 0.6}, "thinking_token_budget", id="thinking_token_budget_float"),
        pytest.param(BOTH, {"stream_options": {"include_usage": None}}, "stream", id="stream_options_null"),
        pytest.param(BOTH, {"seed": -(2**63) - 1}, "seed", id="long_seed"),
        pytest.param(("text",), {"prompt": []}, "prompt", id="empty_prompt_list"),
        pytest.param(("text",), {"prompt": None, "prompt_embeds": []}, "prompt", id="empty_prompt"),
        pytest.param(("text",), {"prompt": [999999]}, "999999 vocabulary", id="out_of_vocab_token_ids"),
        pytest.param(("text",), {"prompt": [[-1]]}, "prompt", id="negative_prompt_token_ids_nested"),
        pytest.param(("text",), {"logprobs": 21}, "logprobs", id="too_many_completion_logprobs"),
        pytest.param(("text",), {"logprobs": 30, "stream": True}, "logprobs", id="too_many_logprobs_of_a_stream"),
        pytest.param(("chat",), {"logprobs": True, "top_logprobs": 21}, "top_logprobs", id="too_many_chat_logprobs"),
        pytest.param(("chat",), {"tool_choice": "auto"}, "tool_choice", id="tool_choice_auto_without_tools"),
        pytest.param(("chat",), {"tool_choice": "bogus", "tools": TOOLS}, "tool_choice", id="invalid_tool_choice"),
        pytest.param(("chat",), {"tool_choice": {}, "tools": TOOLS}, "tool_choice", id="empty_tool_choice"),
        pytest.param(
            ("chat",),
            {"messages": SAYING, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            id="check_generation_prompt",
        ),
    ],
)
def test_refused(base_url: str, endpoints: tuple[str, ...], fields: dict[str, Any], words: str) -> None:
    for endpoint in endpoints:
        answer = ask(base_url, endpoint, **fields)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("BadRequestError", 400)
        told = f"{error['message']} {error['param']}".lower()
        missing = [word for word in words.split() if word not in told]
        assert not missing, error


@pytest.mark.parametrize("body", ["this is no object", ["not", "an", "object"], 42, None])
def test_a_body_that_is_no_object(base_url: str, body: Any) -> None:
    for path, _ in PATHS.values():
        assert httpx.post(base_url + path, json=body).status_code == 400


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"tool_choice": None}, id="null_tool_choice_without_tools"),
        pytest.param({"tool_choice": None, "structured_outputs": {"regex": "a+"}}, id="null_tool_choice_and_a_format"),
        pytest.param({"tool_choice": "none"}, id="tool_choice_none_without_tools"),
        pytest.param({"thinking_token_budget": -1}, id="thinking_token_budget_unlimited"),
        pytest.param({"min_characters": 10}, id="extra_field"),
        pytest.param({"messages": [{**CHAT["messages"][0], "extra_field": "0"}]}, id="extra_field_of_a_message"),
        pytest.param({"response_format": {"type": "text"}}, id="response_format_text"),
        pytest.param({"seed": 2**64 - 1}, id="largest_seed"),  # vLLM's is half of it
        pytest.param({"tools": []}, id="empty_tools"),  # vLLM refuses them
    ],
)
def test_accepted(base_url: str, fields: dict[str, Any]) -> None:
    assert ask(base_url, "chat", **fields).status_code == 200


@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")], ids=["required", "named"])
def test_content_beside_forced_calls_is_empty(demo_server: Any, choice: Any, reason: str) -> None:
    """`test_named_tool_use` takes the length of the content."""
    fields = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 60, "model": "quire-demo"}
    [told] = ask(demo_server.base_url, "chat", **fields).json()["choices"]
    assert (told["message"]["content"], told["finish_reason"]) == ("", reason)
    assert told["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    [cut] = ask(demo_server.base_url, "chat", **{**fields, "max_tokens": 1}).json()["choices"]
    assert (cut["message"]["content"], cut["finish_reason"]) == ("", "length")
    assert "tool_calls" not in cut["message"]


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_forced_calls_need_no_parser(base_url: str, choice: Any) -> None:
    """vLLM refuses them (`test_tool_choice_validation_without_parser`)."""
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    function = {"name": "get_weather", "parameters": {**schema, "additionalProperties": False}}
    fields = {"tools": [{"type": "function", "function": function}], "tool_choice": choice, "max_tokens": 300}
    [told] = ask(base_url, "chat", **fields).json()["choices"]
    for call in told["message"]["tool_calls"]:
        assert call["function"]["name"] == "get_weather"
    assert json.loads(told["message"]["tool_calls"][0]["function"]["arguments"])["a"] in ("x", "y")


def test_a_choice_among_allowed_tools_names_no_function(demo_server: Any) -> None:
    """So its calls end as those of `auto` do."""
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
    fields = {"tools": TOOLS, "tool_choice": allowed, "max_tokens": 60, "model": "quire-demo"}
    [told] = ask(demo_server.base_url, "chat", **fields).json()["choices"]
    assert (told["message"]["content"], told["finish_reason"]) == (None, "tool_calls")


def test_a_null_choice_is_auto(demo_server: Any) -> None:
    """The model may call: answers to the same request then differ in the ids of their calls alone."""
    messages = [{"role": "user", "content": "What is the weather in Paris? Call get_weather."}]
    fields = {"messages": messages, "tools": TOOLS, "max_tokens": 30, "model": "quire-demo"}
    answers = [ask(demo_server.base_url, "chat", **fields, **more).json() for more in ({}, {"tool_choice": None})]
    for answer in answers:
        for call in answer["choices"][0]["message"]["tool_calls"]:
            del call["id"]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["choices"][0]["message"]["tool_calls"], "auto lets the model call"


@pytest.mark.parametrize(
    "result",
    [
        {"content": "It is sunny."},
        {"content": [{"type": "text", "text": "It is "}, {"type": "text", "text": "sunny."}]},
        {"content": "It is sunny.", "tool_call_id": "call_123"},
        {"content": None, "tool_call_id": "call_123"},
    ],
    ids=["string", "array", "with_id", "none"],
)
@pytest.mark.parametrize("arguments", ['{"city": "Paris"}', "", None], ids=["arguments", "empty", "none"])
def test_results_of_calls_take_each_form(demo_server: Any, result: dict[str, Any], arguments: str | None) -> None:
    call = {"id": "call_123", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    messages = [*CHAT["messages"], {"role": "assistant", "tool_calls": [call]}, {"role": "tool", **result}]
    answer = ask(demo_server.base_url, "chat", messages=messages, tools=TOOLS, model="quire-demo")
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("content", ["", None, []], ids=["empty", "none", "empty_list"])
def test_reasoning_without_content_stays_in_the_conversation(demo_server: Any, content: Any) -> None:
    def num_prompt_tokens(**more: Any) -> int:
        turn = {"role": "assistant", "content": content, **more}
        fields = {"messages": [*CHAT["messages"], turn], "model": "quire-demo"}
        return ask(demo_server.base_url, "chat", **fields).json()["usage"]["prompt_tokens"]

    assert num_prompt_tokens(reasoning="Adding 1 and 1 is easy.") > num_prompt_tokens()


@pytest.mark.parametrize("name", ["", None, "alias"])
def test_serving_chat_returns_correct_model_name(named_server: Any, name: str | None) -> None:
    """The first name, whichever of them was asked for; an empty one stands for it."""
    for endpoint in BOTH:
        assert ask(named_server.base_url, endpoint, model=name).json()["model"] == "tiny"


def test_tokens_are_counted_up_in_each_chunk(base_url: str) -> None:
    """`continuous_usage_stats` with text in every chunk, and once more beside no choice at the end."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    for endpoint in BOTH:
        text = ask(base_url, endpoint, stream=True, stream_options=options, ignore_eos=True).text
        chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-2:] == [5, 5]
        assert chunks[-1]["choices"] == []
        assert all(
            chunk["usage"]["total_tokens"] == chunk["usage"]["prompt_tokens"] + count
            for chunk, count in zip(chunks, counts, strict=True)
        )


def test_roles_that_the_template_does_not_know_read_alike(base_url: str) -> None:
    forms = ("what is 1+1?", [{"type": "text", "text": "what is 1+1?"}])
    answers = [ask(base_url, "chat", messages=[{"role": "my-custom-role", "content": form}]) for form in forms]
    assert len({answer.json()["choices"][0]["message"]["content"] for answer in answers}) == 1


def test_invocations_answer_as_the_endpoint_does(base_url: str) -> None:
    body = {"model": "tiny", "max_tokens": 5, "temperature": 0, **CHAT}
    answers = [httpx.post(base_url + path, json=body).json() for path in ("/invocations", "/v1/chat/completions")]
    assert answers[0].keys() == answers[1].keys()
    assert answers[0]["choices"] == answers[1]["choices"]


def test_echo_goes_before_the_answer_that_continues_it(base_url: str) -> None:
    fields = {"messages": SAYING, "continue_final_message": True, "add_generation_prompt": False}
    [plain, echoed] = [
        ask(base_url, "chat", echo=echo, **fields).json()["choices"][0]["message"]["content"] for echo in (False, True)
    ]
    assert echoed == "An apple a day" + plain
