"""Unknown fields of requests: ignored in plain sight, or refused with --strict-fields."""

import re
from typing import Any
from urllib.parse import unquote

import httpx
import msgspec
import pytest
from msgspec import Struct

from quire.core.errors import ParameterError
from quire.frontend.http.json_request import BodyReader
from quire.frontend.http.unknown_fields import MAX_FIELDS, MAX_HEADER_BYTES, MAX_LOGGED
from quire.frontend.openai.schema import ChatRequest, CompletionRequest
from tests.servers import ServerProcess

MESSAGES = [{"role": "user", "content": "a"}]
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "a", "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2}),
    ("/v1/responses", {"input": "a", "max_output_tokens": 2}),
    ("/v1/messages", {"model": "tiny", "messages": MESSAGES, "max_tokens": 2}),
    ("/invocations", {"prompt": "a", "max_tokens": 2}),
]
HEADER = "x-quire-ignored-fields"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), ROUTES, ids=lambda value: value if isinstance(value, str) else "")
def test_unknown_fields_are_ignored_and_listed(
    server: ServerProcess, path: str, body: dict[str, Any], stream: bool
) -> None:
    known = {**body, "stream": stream}
    plain = httpx.post(server.base_url + path, json=known)
    assert plain.status_code == 200
    assert HEADER not in plain.headers
    answer = httpx.post(server.base_url + path, json={**known, "max_token": 5, "client_metadata": {"a": [1]}})
    assert answer.status_code == 200, answer.text
    assert answer.headers[HEADER] == "max_token, client_metadata"


PADDED: dict[str, Any] = {"stream": True, "stream_options": {"include_obfuscation": True}}
STYLES: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"verbosity": "low"}, "verbosity"),
    ("/v1/responses", {"text": {"verbosity": "low"}}, "text.verbosity"),
    ("/v1/responses", {"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm"),
    ("/v1/responses", {"include": ["message.input_image.image_url"]}, "include.message.input_image.image_url"),
    *((path, PADDED, "stream_options.include_obfuscation") for path, _ in ROUTES[:3]),
]
SILENT: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"verbosity": "medium", "prompt_cache_options": {"mode": "explicit"}}),
    ("/v1/responses", {"text": {"verbosity": "medium"}, "service_tier": "ultrafast"}),
    *((path, {"stream": True, "stream_options": {"include_obfuscation": False}}) for path, _ in ROUTES[:3]),
]


@pytest.mark.parametrize(("path", "fields", "named"), STYLES, ids=lambda value: str(value)[:40])
def test_a_style_that_no_model_knows_is_ignored_and_listed(
    server: ServerProcess, path: str, fields: dict[str, Any], named: str
) -> None:
    answer = httpx.post(server.base_url + path, json={**dict(ROUTES)[path], **fields})
    assert answer.status_code == 200, answer.text
    assert answer.headers[HEADER] == named


@pytest.mark.parametrize(("path", "fields"), SILENT, ids=lambda value: str(value)[:40])
def test_what_asks_for_the_usual_is_not_listed(server: ServerProcess, path: str, fields: dict[str, Any]) -> None:
    answer = httpx.post(server.base_url + path, json={**dict(ROUTES)[path], **fields})
    assert answer.status_code == 200, answer.text
    assert HEADER not in answer.headers


def test_an_error_about_something_else_lists_them_too(server: ServerProcess) -> None:
    body = {"prompt": "a", "colour": "red", "temperature": -1}
    answer = httpx.post(server.base_url + "/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "temperature"
    assert answer.headers[HEADER] == "colour"


def test_a_name_is_logged_once_with_the_known_name_that_it_resembles(server: ServerProcess) -> None:
    for _ in range(2):
        httpx.post(server.base_url + "/v1/completions", json={"prompt": "a", "temprature": 0}).raise_for_status()
    [line] = [each for each in server.logs().splitlines() if "temprature" in each]
    assert "Did you mean 'temperature'?" in line


def read(body: dict[str, Any], kind: Any) -> tuple[Any, list[str]]:
    value, ignored = BodyReader(strict=False).read(msgspec.json.encode(body), kind)
    header = ignored.header().decode("ascii")
    return value, header.split(", ") if header else []


class Leaf(Struct, forbid_unknown_fields=True):
    known: int = 0


class Tree(Struct, forbid_unknown_fields=True):
    leaves: list[Leaf] | str | None = None
    by_name: dict[str, Leaf] = {}
    free: dict[str, Any] = {}


def test_fields_are_found_at_any_depth() -> None:
    body = {
        "leaves": [{"known": 1}, {"known": 2, "other": 1}, {"other": 2}],
        "by_name": {"a": {"known": 3, "odd": {}}},
        "free": {"anything": 1},
    }
    tree, ignored = read(body, Tree)
    assert tree == Tree([Leaf(1), Leaf(2), Leaf()], {"a": Leaf(3)}, {"anything": 1})
    assert ignored == ["leaves[1].other", "by_name.a.odd"]


def test_an_unknown_field_beside_a_whole_float() -> None:
    request, ignored = read({"prompt": "a", "max_tokens": 2.0, "colour": 1}, CompletionRequest)
    assert (request.max_tokens, ignored) == (2, ["colour"])


def test_unknown_fields_of_a_format() -> None:
    schema = {"name": "n", "schema": {"type": "object"}, "version": 2}
    body = {"messages": MESSAGES, "response_format": {"type": "json_schema", "json_schema": schema, "extra": 1}}
    request, ignored = read(body, ChatRequest)
    assert ignored == ["response_format.extra", "response_format.json_schema.version"]
    assert request.read_format().json == {"type": "object"}


@pytest.mark.parametrize("body", [{"prompt": "a", "n": "x", "colour": 1}, {"colour": 1, "prompt": [{}]}])
def test_a_wrong_type_is_refused_all_the_same(body: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match="expected"):
        read(body, CompletionRequest)


@pytest.mark.parametrize("name", ["a, b", "x\r\nSet-Cookie: y", "é\x00", "n" * 5000])
def test_the_header_is_safe_and_short(name: str) -> None:
    _, [shown] = read({"prompt": "a", name: 1}, CompletionRequest)
    assert re.fullmatch(r"[!-+\--~]*", shown)
    assert unquote(shown).removesuffix("...") == name[:100]


def test_thousands_of_names_stay_bounded(caplog: pytest.LogCaptureFixture) -> None:
    reader = BodyReader(strict=False)
    for start in range(0, 2000, 100):
        body = {"prompt": "a", **{f"field {number} {'x' * 30}": 1 for number in range(start, start + 100)}}
        _, ignored = reader.read(msgspec.json.encode(body), CompletionRequest)
        assert len(list(ignored.names)) == MAX_FIELDS
        assert len(ignored.header()) <= MAX_HEADER_BYTES + len(", ...")
    assert len(caplog.records) == MAX_LOGGED + 1


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"temprature": 1}, "Unknown field 'temprature'. Did you mean 'temperature'?"),
        ({"response_format": {"type": "text", "colour": 1}}, "response_format.colour would be ignored"),
    ],
)
def test_strict_fields_refuses_what_would_be_ignored(body: dict[str, Any], said: str) -> None:
    with pytest.raises(ParameterError) as caught:
        BodyReader(strict=True).read(msgspec.json.encode({"prompt": "a", **body}), CompletionRequest)
    assert said in str(caught.value)
    assert caught.value.param == next(iter(body))
