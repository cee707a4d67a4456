"""Every field of a request is honoured, refused by name, or known to be harmless."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

import quire.frontend.chat
import quire.frontend.openai
from quire.core.errors import ParameterError
from quire.core.wire.request_ids import engine_id
from quire.core.wire.sampling_params import RequestOutputKind
from quire.frontend.chat.body_fields import OTHER_SAMPLING_FIELDS, SAMPLING_FIELDS
from quire.frontend.chat.client_headers import ClientHeaders
from quire.frontend.http.json_request import decode_body
from quire.frontend.openai.output_format import OutputFields
from quire.frontend.openai.schema import ChatRequest, CompletionRequest, GenerationRequest
from quire.frontend.refusals.fields import HARMLESS, UNSUPPORTED

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
TEXT: dict[str, Any] = {"prompt": "a"}
KINDS: list[tuple[type[GenerationRequest], dict[str, Any]]] = [(ChatRequest, CHAT), (CompletionRequest, TEXT)]
FIELDS = [(kind, body, name) for kind, body in KINDS for name in kind.__struct_fields__]


def read(kind: type[GenerationRequest], body: dict[str, Any]) -> Any:
    request = decode_body(msgspec.json.encode(body), kind)
    request.check()
    if isinstance(request, ChatRequest):
        request.to_chat_input()
    return request


@pytest.mark.parametrize(("kind", "body", "name"), FIELDS, ids=lambda value: value if isinstance(value, str) else "")
def test_null_means_unset(kind: type[GenerationRequest], body: dict[str, Any], name: str) -> None:
    if name != "messages":
        assert read(kind, {**body, name: None}) == read(
            kind, {key: value for key, value in body.items() if key != name}
        )


@pytest.mark.parametrize(
    ("kind", "body", "name"), [each for each in FIELDS if each[2] in UNSUPPORTED], ids=lambda value: str(value)[:40]
)
def test_unsupported_field_is_refused_unless_it_asks_for_nothing(
    kind: type[GenerationRequest], body: dict[str, Any], name: str
) -> None:
    for nothing in UNSUPPORTED[name].nothing:
        read(kind, {**body, name: nothing})
    with pytest.raises(ParameterError, match=rf"^{name} is refused: \w+ .*\.$") as caught:
        read(kind, {**body, name: {"some": "thing"}})
    assert caught.value.param == name


VLLM_FIELDS: dict[type[GenerationRequest], str] = {
    ChatRequest: """
        add_generation_prompt add_special_tokens allowed_token_ids bad_words cache_salt chat_template
        chat_template_kwargs continue_final_message documents ec_transfer_params echo frequency_penalty ignore_eos
        include_reasoning include_stop_str_in_output kv_transfer_params length_penalty logit_bias logprob_token_ids
        logprobs max_completion_tokens max_tokens media_io_kwargs messages min_p min_tokens mm_payload
        mm_processor_kwargs model n parallel_tool_calls presence_penalty priority prompt_logprobs reasoning_effort
        repetition_detection repetition_penalty request_id response_format return_mm_kwargs return_prompt_text
        return_token_ids return_token_offsets return_tokens_as_token_ids routed_experts_prompt_start seed session_id
        skip_special_tokens spaces_between_special_tokens stop stop_token_ids stream stream_interval stream_options
        structured_outputs temperature thinking_token_budget tool_choice tools top_k top_logprobs top_p
        truncate_prompt_tokens truncation_side use_beam_search user vllm_xargs watermarking
    """,
    CompletionRequest: """
        add_special_tokens allowed_token_ids bad_words cache_salt ec_transfer_params echo frequency_penalty ignore_eos
        include_stop_str_in_output kv_transfer_params length_penalty logit_bias logprob_token_ids logprobs max_tokens
        min_p min_tokens mm_payload model n presence_penalty priority prompt prompt_embeds prompt_logprobs
        repetition_detection repetition_penalty request_id response_format return_mm_kwargs return_token_ids
        return_token_offsets return_tokens_as_token_ids routed_experts_prompt_start seed session_id
        skip_special_tokens spaces_between_special_tokens stop stop_token_ids stream stream_interval stream_options
        structured_outputs suffix temperature thinking_token_budget top_k top_p truncate_prompt_tokens truncation_side
        use_beam_search user vllm_xargs watermarking
    """,
}
"""What vLLM 0.32's OpenAPI document lists."""


@pytest.mark.parametrize("kind", VLLM_FIELDS)
def test_every_field_of_vllms_is_known(kind: type[GenerationRequest]) -> None:
    assert set(VLLM_FIELDS[kind].split()) - set(kind.__struct_fields__) == set()


READ_OF_ANY_BODY = {"timeout"}
"""Fields that `JsonRequest` reads."""


@pytest.mark.parametrize("kind", VLLM_FIELDS)
def test_every_field_is_read_somewhere_or_refused(kind: type[GenerationRequest]) -> None:
    """A field that no code of ours reads would be accepted and ignored."""
    rooms = (quire.frontend.openai, quire.frontend.chat)
    sources = "".join(path.read_text() for room in rooms for path in Path(room.__path__[0]).rglob("*.py"))
    known = {*UNSUPPORTED, *HARMLESS, *OutputFields.__struct_fields__, *SAMPLING_FIELDS, *OTHER_SAMPLING_FIELDS}
    names = set(kind.__struct_fields__) - known - READ_OF_ANY_BODY
    unread = [name for name in names if not re.search(rf"\.{name}\b", sources)]
    assert unread == []


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [(kind, {"truncation_side": "left"}, "truncation_side") for kind in (ChatRequest, CompletionRequest)]
    + [
        (CompletionRequest, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (CompletionRequest, {"length_penalty": 2}, "length_penalty"),
        (CompletionRequest, {"early_stopping": True}, "early_stopping"),
        (CompletionRequest, {"logprob_token_ids": [1]}, "logprob_token_ids"),
        (
            CompletionRequest,
            {"logprob_token_ids": [1], "logprobs": 1, "echo": True, "max_tokens": 0},
            "logprob_token_ids",
        ),
        (CompletionRequest, {"use_beam_search": True, "echo": True, "logprobs": 1}, "echo"),
        (CompletionRequest, {"cache_salt": "a" * 2000}, "cache_salt"),
        (CompletionRequest, {"repetition_detection": {"max_pattern_size": 3}}, "repetition_detection"),
        (CompletionRequest, {"repetition_detection": {"size": 3}}, "repetition_detection.size"),
        (CompletionRequest, {"truncation_side": "up"}, "truncation_side"),
        (CompletionRequest, {"vllm_xargs": {"a": {}}}, "vllm_xargs[...]"),
        (CompletionRequest, {"stream_interval": "two"}, "stream_interval"),
        (ChatRequest, {"logprob_token_ids": [1]}, "logprob_token_ids"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_contradictions_and_wrong_types_name_the_field(
    kind: type[GenerationRequest], fields: dict[str, Any], param: str
) -> None:
    body = CHAT if kind is ChatRequest else TEXT
    with pytest.raises(ParameterError) as caught:
        read(kind, {**body, **fields})
    assert caught.value.param == param


@pytest.mark.parametrize("bias", [{"x": 1.0}, {"-1": 1.0}, {"1.5": 1.0}, {"9" * 5000: 1.0}])
def test_keys_of_logit_bias_are_ids(bias: dict[str, float]) -> None:
    request = read(CompletionRequest, {**TEXT, "logit_bias": bias})
    with pytest.raises(ParameterError) as caught:
        request.sampling_fields(None)
    assert caught.value.param == "logit_bias"


def test_tables_name_fields_that_exist() -> None:
    fields = {name for _, _, name in FIELDS}
    assert set(UNSUPPORTED) <= fields
    assert set(HARMLESS) <= fields


def test_what_a_request_says_of_sampling() -> None:
    fields = read(ChatRequest, {**CHAT, "temperature": 0.5, "stop": ["x"], "n": 2}).sampling_fields(None)
    assert {name: value for name, value in fields.items() if value is not None} == {
        "temperature": 0.5,
        "stop": ["x"],
        "n": 2,
        "output_kind": RequestOutputKind.FINAL_ONLY,
    }
    streamed = read(ChatRequest, {**CHAT, "stream": True}).sampling_fields(None)
    assert streamed["output_kind"] is RequestOutputKind.DELTA


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        ([1, 2], [[1, 2]]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_prompts_one_by_one(prompt: Any, prompts: list[Any]) -> None:
    assert read(CompletionRequest, {"prompt": prompt}).prompts() == prompts


def test_ids_come_from_header_then_body_and_are_unique_in_the_engine() -> None:
    header, made = ClientHeaders(request_id="theirs"), ClientHeaders(fresh_id="made")
    assert header.choose_id("mine") == header.choose_id(None) == "theirs"
    assert ClientHeaders().choose_id("mine") == made.choose_id("mine") == "mine"
    assert made.choose_id(None) == "made"
    assert ClientHeaders().choose_id(None) != ClientHeaders().choose_id(None)
    assert len(ClientHeaders(request_id="x" * 10_000).choose_id(None)) < 300
    assert engine_id("cmpl-mine") != engine_id("cmpl-mine")
