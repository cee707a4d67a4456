"""Every field of the Responses and Messages APIs reaches the engine, is refused by name, or is known to be harmless."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from quire.core.errors import ParameterError
from quire.core.wire.sampling_params import RequestOutputKind
from quire.core.wire.structured_outputs import StructuredOutputsParams
from quire.frontend.anthropic.schema import CountTokensRequest, MessagesRequest
from quire.frontend.chat.chat_input import ChatInput
from quire.frontend.http.json_request import decode_body
from quire.frontend.openai.responses.schema import OUTPUT_LOGPROBS, ResponsesRequest
from quire.frontend.openai.responses.tools import OfferedTools
from quire.frontend.openai.schema import ChatRequest

FUNCTION: dict[str, Any] = {"name": "f", "parameters": {"type": "object"}}
SCHEMA: dict[str, Any] = {"type": "object", "title": "t"}
FORMAT = StructuredOutputsParams(json=SCHEMA)

RESPONSES_CARRY: dict[str, tuple[Any, str, Any]] = {
    "max_output_tokens": (7, "max_tokens", 7),
    "tools": ([{"type": "function", **FUNCTION}], "tools.described", [{"type": "function", "function": FUNCTION}]),
    "tool_choice": ("none", "tools.choice.mode", "none"),
    "parallel_tool_calls": (False, "tools.choice.max_calls", 1),
    "max_tool_calls": (3, "tools.choice.max_calls", 3),
    "reasoning": ({"effort": "low"}, "reasoning_effort", "low"),
    "text": (
        {"format": {"type": "json_schema", "name": "output", "schema": SCHEMA, "strict": True}},
        "sampling.structured_outputs",
        FORMAT,
    ),
    "structured_outputs": ({"regex": "a"}, "sampling.structured_outputs", StructuredOutputsParams(regex="a")),
    "include": ([OUTPUT_LOGPROBS], "sampling.logprobs", 0),
    "top_logprobs": (2, "sampling.logprobs", 2),
    "logit_bias": ({"1": 1.0}, "sampling.logit_bias", {1: 1.0}),
    "vllm_xargs": ({"a": 1}, "sampling.extra_args", {"a": 1}),
    "stream": (True, "sampling.output_kind", RequestOutputKind.DELTA),
    "priority": (3, "priority", 3),
    "cache_salt": ("s", "cache_salt", "s"),
    "include_reasoning": (False, "include_reasoning", False),
    "chat_template_kwargs": ({"a": 1}, "template_variables", {"a": 1}),
    "mm_processor_kwargs": ({"a": 1}, "media.processor", {"a": 1}),
    "media_io_kwargs": ({"video": {"fps": 2}}, "media.io", {"video": {"fps": 2}}),
    **{
        name: (value, f"sampling.{name}", value)
        for name, value in {
            "temperature": 0.5,
            "top_p": 0.5,
            "top_k": 3,
            "min_p": 0.1,
            "presence_penalty": 1.0,
            "frequency_penalty": 1.0,
            "repetition_penalty": 1.5,
            "seed": 3,
            "stop": ["a"],
            "stop_token_ids": [5],
            "ignore_eos": True,
            "skip_special_tokens": False,
            "include_stop_str_in_output": True,
        }.items()
    },
}
"""A field, a value of it, and the place in the ChatInput that then has which value."""

MESSAGES_CARRY: dict[str, tuple[Any, str, Any]] = {
    "max_tokens": (7, "max_tokens", 7),
    "stop_sequences": (["a"], "sampling.stop", ["a"]),
    "system": ("Be brief.", "messages", [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}]),
    "tools": (
        [{"name": "f", "input_schema": {"type": "object"}}],
        "tools.described",
        [{"type": "function", "function": FUNCTION}],
    ),
    "tool_choice": ({"type": "auto", "disable_parallel_tool_use": True}, "tools.choice.max_calls", 1),
    "thinking": ({"type": "disabled"}, "template_variables", {"enable_thinking": False}),
    "output_config": (
        {"format": {"type": "json_schema", "schema": SCHEMA}},
        "sampling.structured_outputs",
        FORMAT,
    ),
    "vllm_xargs": ({"a": 1}, "sampling.extra_args", {"a": 1}),
    "stream": (True, "sampling.output_kind", RequestOutputKind.DELTA),
    "cache_salt": ("s", "cache_salt", "s"),
    "chat_template_kwargs": ({"a": 1}, "template_variables", {"a": 1}),
    "temperature": (0.5, "sampling.temperature", 0.5),
    "top_p": (0.5, "sampling.top_p", 0.5),
    "top_k": (3, "sampling.top_k", 3),
}

REFUSED_BY_BOTH: dict[str, Any] = {
    "watermarking": True,
    "kv_transfer_params": {"a": 1},
    "ec_transfer_params": {"a": 1},
    "mm_payload": "none",
    "return_mm_kwargs": True,
}
RESPONSES_REFUSE: dict[str, Any] = {
    **REFUSED_BY_BOTH,
    "prompt": {"id": "x"},
    "previous_input_messages": [{"role": "user"}],
}
MESSAGES_REFUSE: dict[str, Any] = {**REFUSED_BY_BOTH, "thread": {"type": "create"}}

RESPONSES_HARMLESS = {
    *("service_tier", "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "session_id"),
    *("prompt_cache_options", "stream_options"),
}
MESSAGES_HARMLESS = {"metadata", "service_tier", "cache_control", "context_management"}
RESPONSES_OWN = {
    *("input", "instructions", "previous_response_id", "store", "background", "truncation", "request_id", "metadata"),
    *("model", "conversation", "enable_response_messages", "timeout"),
}
"""What the service itself reads; `test_responses.py`, `test_vllm_responses.py`, `test_deadlines.py` show what for."""

VLLM_RESPONSES = """
    background include input instructions max_output_tokens max_tool_calls metadata model logit_bias parallel_tool_calls
    previous_response_id prompt reasoning include_reasoning service_tier store stream temperature text tool_choice tools
    top_logprobs top_p top_k min_p truncation user skip_special_tokens include_stop_str_in_output presence_penalty
    frequency_penalty prompt_cache_key prompt_cache_options prompt_cache_retention safety_identifier watermarking
    request_id session_id media_io_kwargs mm_processor_kwargs priority
    mm_payload return_mm_kwargs cache_salt enable_response_messages previous_input_messages structured_outputs
    repetition_penalty seed stop stop_token_ids ignore_eos vllm_xargs kv_transfer_params ec_transfer_params
    chat_template_kwargs
"""
VLLM_MESSAGES = """
    model messages max_tokens metadata output_config thinking stop_sequences stream system temperature tool_choice tools
    top_k top_p mm_payload return_mm_kwargs cache_salt watermarking kv_transfer_params ec_transfer_params vllm_xargs
    chat_template_kwargs
"""
VLLM_COUNT_TOKENS = "model messages output_config system thinking tool_choice tools chat_template_kwargs"
"""What vLLM 0.33's OpenAPI document lists."""


def respond(**fields: Any) -> ChatInput:
    if "top_logprobs" in fields:
        fields["include"] = [OUTPUT_LOGPROBS]
    if "tool_choice" in fields:
        fields["tools"] = RESPONSES_CARRY["tools"][0]
    request = decode_body(msgspec.json.encode({"input": "a", **fields}), ResponsesRequest)
    request.check()
    return request.to_chat_input([{"role": "user", "content": "a"}], OfferedTools(request.tools))


def message(**fields: Any) -> ChatInput:
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}], **fields}
    request = decode_body(msgspec.json.encode(body), MessagesRequest)
    request.check()
    return request.to_chat_input()


def test_an_unknown_effort_is_refused_by_name_everywhere() -> None:
    chat = {"messages": [{"role": "user", "content": "a"}], "reasoning_effort": "ultra"}
    asked: dict[str, Callable[[], Any]] = {
        "reasoning_effort": lambda: decode_body(msgspec.json.encode(chat), ChatRequest),
        "reasoning.effort": lambda: respond(reasoning={"effort": "ultra"}),
        "output_config.effort": lambda: message(output_config={"effort": "ultra"}),
    }
    for name, ask in asked.items():
        with pytest.raises(ParameterError, match="ultra") as caught:
            ask()
        assert caught.value.param == name


def found(chat: ChatInput, place: str) -> Any:
    value: Any = chat
    for name in place.split("."):
        value = value.get(name) if isinstance(value, dict) else getattr(value, name)
    return value


def test_no_field_is_forgotten() -> None:
    known = RESPONSES_CARRY.keys() | RESPONSES_REFUSE.keys() | RESPONSES_HARMLESS | RESPONSES_OWN
    assert known == set(ResponsesRequest.__struct_fields__) >= set(VLLM_RESPONSES.split())
    known = MESSAGES_CARRY.keys() | MESSAGES_REFUSE.keys() | MESSAGES_HARMLESS | {"messages", "model", "timeout"}
    assert known == set(MessagesRequest.__struct_fields__) >= set(VLLM_MESSAGES.split())
    assert set(CountTokensRequest.__struct_fields__) >= set(VLLM_COUNT_TOKENS.split())


@pytest.mark.parametrize("name", RESPONSES_CARRY)
def test_a_responses_field_has_an_effect(name: str) -> None:
    value, place, expected = RESPONSES_CARRY[name]
    assert found(respond(**{name: value}), place) == expected
    without = respond(tools=RESPONSES_CARRY["tools"][0]) if name == "tool_choice" else respond()
    assert found(without, place) != expected


@pytest.mark.parametrize("name", MESSAGES_CARRY)
def test_a_messages_field_has_an_effect(name: str) -> None:
    value, place, expected = MESSAGES_CARRY[name]
    assert found(message(**{name: value}), place) == expected
    assert found(message(), place) != expected


def test_a_template_is_told_the_choice_and_the_format() -> None:
    tool = {"type": "function", "function": FUNCTION}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    body = {"messages": [{"role": "user", "content": "a"}], "tools": [tool], "tool_choice": "required"}
    told = decode_body(msgspec.json.encode({**body, "response_format": form}), ChatRequest).to_chat_input()
    assert told.request_variables == {"request": {"tool_choice": "required", "response_format": form}}
    text = {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}
    told = respond(tools=[{"type": "function", **FUNCTION}], tool_choice="none", text=text)
    assert told.request_variables["request"]["tool_choice"] == "none"
    assert told.request_variables["request"]["response_format"]["json_schema"]["schema"] == SCHEMA
    tools, form = [{"name": "f", "input_schema": {"type": "object"}}], {"type": "json_schema", "schema": SCHEMA}
    told = message(tools=tools, tool_choice={"type": "any"}, output_config={"format": form})
    assert told.request_variables["request"]["tool_choice"] == "required"
    assert told.request_variables["request"]["response_format"]["json_schema"]["schema"] == SCHEMA
    assert message().request_variables == {"request": {}}


@pytest.mark.parametrize("name", RESPONSES_REFUSE)
def test_a_responses_field_is_refused_by_name(name: str) -> None:
    with pytest.raises(ParameterError) as caught:
        respond(**{name: RESPONSES_REFUSE[name]})
    assert caught.value.param == name


@pytest.mark.parametrize("name", MESSAGES_REFUSE)
def test_a_messages_field_is_refused_by_name(name: str) -> None:
    with pytest.raises(ParameterError) as caught:
        message(**{name: MESSAGES_REFUSE[name]})
    assert caught.value.param == name
