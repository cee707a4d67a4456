"""Exceptions become answers in OpenAI's shape; broken bodies name the field or the position."""

from http import HTTPStatus
from typing import Any

import msgspec
import pytest

from quire.core import errors as core_errors
from quire.core.errors import ParameterError, QuireError
from quire.frontend.anthropic.schema import MessagesRequest
from quire.frontend.http import errors
from quire.frontend.http.json_request import decode_body
from quire.frontend.openai.responses.schema import ResponsesRequest
from quire.frontend.openai.schema import ChatRequest, CompletionRequest

STATUS = [
    (core_errors.ParameterError("top_p is 3", param="top_p"), 400, "top_p"),
    (core_errors.RequestError("no"), 400, None),
    (core_errors.BodyTooLargeError("8 MB and no more"), 413, None),
    (core_errors.NotFoundError("no model", param="model"), 404, "model"),
    (core_errors.OverloadedError("full", retry_after_seconds=2.2), 429, None),
    (core_errors.EngineError("crashed"), 500, None),
    (core_errors.EngineDeadError("gone"), 503, None),
    (core_errors.ConfigError("odd"), 500, None),
    (core_errors.TokenizerError("its own code failed"), 500, None),
    (errors.AuthenticationError("no key"), 401, None),
    (core_errors.UnavailableError("loading", retry_after_seconds=1), 503, None),
    (errors.RequestTimeoutError("half a body"), 408, None),
    (core_errors.DeadlineError("late"), 504, None),
]


@pytest.mark.parametrize(("error", "status", "param"), STATUS, ids=lambda value: type(value).__name__)
def test_every_error_has_its_status_and_openai_shape(error: QuireError, status: int, param: str | None) -> None:
    problem = errors.describe(error)
    assert problem.status == status
    body = msgspec.json.decode(problem.body())
    assert body["error"]["message"] == str(error)
    assert body["error"]["param"] == param
    assert body["error"]["code"] == status
    assert body["error"]["type"].endswith("Error")
    assert HTTPStatus(status)


def test_status_table_covers_the_whole_tree() -> None:
    def leaves(kind: type) -> set[type]:
        return {kind}.union(*(leaves(child) for child in kind.__subclasses__()))

    mapped = tuple(type(error) for error, _, _ in STATUS)
    raised_here = {kind for kind in leaves(QuireError) if not kind.__module__.startswith("quire.frontend.cli")}
    unmapped = [kind for kind in raised_here if kind is not QuireError and not issubclass(kind, mapped)]
    assert unmapped == [errors.ClientGoneError]


def test_retry_after_is_whole_seconds_and_at_least_one() -> None:
    assert errors.describe(core_errors.OverloadedError("", retry_after_seconds=2.2)).headers == {"Retry-After": "3"}
    assert errors.describe(core_errors.OverloadedError("", retry_after_seconds=0)).headers == {"Retry-After": "1"}


def test_unplanned_exception_tells_nothing_to_the_client() -> None:
    problem = errors.describe(ZeroDivisionError("secret"))
    assert problem.status == 500
    assert "secret" not in problem.message


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (b"", None, "truncated"),
        (b"{", None, "truncated"),
        (b"[]", None, "expected object"),
        (b'{"prompt": "a"} x', None, "byte 17"),
        (b'{"prompt": "a", "temperature": NaN}', None, "(byte 31); NaN and Infinity"),
        (b'{"prompt": "a", "temperature": -Infinity}', None, "NaN and Infinity"),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature", "out of range"),
        (b'{"prompt": "a", "temperature": "hot"}', "temperature", "expected float"),
        (b'{"prompt": "\\ud800"}', None, "surrogate"),
        (b'{"prompt": "a\\udc00b"}', None, "surrogate"),
        (b'{"prompt": "\xff"}', None, "UTF-8 (byte 12)"),
        (b'{"prompt": "\xed\xa0\x80"}', None, "UTF-8 (byte 12)"),
        (b'{"prompt": "a", "max_tokens": 1.5}', "max_tokens", "expected int"),
        (b'{"prompt": "a", "max_tokens": true}', "max_tokens", "expected int"),
        (b'{"prompt": "a", "max_tokens": 2.0, "n": 1.5}', "n", "expected int"),
        (b'{"prompt": "a", "max_tokens": 2.0, "n": 1', None, "truncated"),
        (b'{"prompt": "a", "max_tokens": 2.0, "user": ' + b"[" * 100_000, None, "too deeply"),
        (b'{"prompt": "a", "stop": ["x", 1]}', "stop[1]", "expected str"),
        (b'{"prompt": "a", "temperatur": 1}', "temperatur", "Did you mean 'temperature'?"),
        (b'{"prompt": "a", "xyzzy": 1}', "xyzzy", "Unknown field 'xyzzy'."),
        (b'{"prompt": "a", "stream_options": {"usage": true}}', "stream_options.usage", "Unknown field"),
        (b'{"prompt": [[1, [2]]]}', "prompt[0][1]", "expected int"),
        (b'{"prompt": ' + b"[" * 100_000, "prompt[0][0]", "expected int"),
        (b'{"prompt": "a", "max_tokens": ' + b"9" * 10_000 + b"}", "max_tokens", "out of range"),
        (b'{"user": ' + b"[" * 100_000, None, "too deeply"),
        (b'{"user": ' + b'{"a":' * 100_000, None, "too deeply"),
    ],
)
def test_broken_body_is_refused_by_name_or_position(body: bytes, param: str | None, words: str) -> None:
    with pytest.raises(ParameterError) as caught:
        decode_body(body, CompletionRequest)
    assert caught.value.param == param
    assert words in str(caught.value)


def test_whole_numbers_may_be_written_as_floats() -> None:
    body = b'{"prompt": [[5.0, 6], [7e0]], "max_tokens": 2.0, "temperature": 1, "logit_bias": {"5": 2.0}}'
    request = decode_body(body, CompletionRequest)
    assert repr((request.prompt, request.max_tokens, request.temperature)) == "([[5, 6], [7]], 2, 1.0)"
    assert request.logit_bias == {"5": 2}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"prompt": "5"}),
        (ChatRequest, {"messages": [{"role": "user", "content": "5"}]}),
        (ResponsesRequest, {"model": "m", "input": "5"}),
        (MessagesRequest, {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "5"}]}),
    ],
)
def test_numbers_and_booleans_may_be_written_as_strings(kind: Any, body: dict[str, Any]) -> None:
    """Texts that look like numbers stay texts, and a long body is read like a short one."""
    limit = {ResponsesRequest: "max_output_tokens", MessagesRequest: "max_tokens"}.get(kind, "max_tokens")
    written = {**body, "temperature": "0.7", "stream": "True", limit: "16", "metadata": {"user_id": "x" * 2**19}}
    read = decode_body(msgspec.json.encode(written), kind)
    assert repr((read.temperature, read.stream, getattr(read, limit))) == "(0.7, True, 16)"
    plain = {**written, "temperature": 0.7, "stream": True, limit: 16}
    assert read == decode_body(msgspec.json.encode(plain), kind)


def test_missing_field_is_named() -> None:
    with pytest.raises(ParameterError, match="'messages' is required") as caught:
        decode_body(b'{"model": "m"}', ChatRequest)
    assert caught.value.param == "messages"
