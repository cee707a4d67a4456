"""The server conforms to its own OpenAPI document, tested by schemathesis."""

import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.transforms import deepclone
from schemathesis.generation.case import Case
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from tests.servers import ServerProcess

NUM_EXAMPLES = 15
"""For each operation and kind of body."""

MODEL = "quire-demo"
TEXT = [{"role": "user", "content": "Hello"}]
TOKENS = {"request_id": "a", "choices": [{"index": 0, "token_ids": [5]}]}
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TEXT, "max_tokens": 2},
    "/v1/chat/completions/batch": {"messages": [TEXT, TEXT], "max_tokens": 2},
    "/v1/chat/completions/render": {"messages": TEXT},
    "/v1/chat/completions/derender": {"generate_response": TOKENS, "chat_request": {"messages": TEXT}},
    "/v1/completions": {"prompt": ["Hello", "There"], "max_tokens": 2},
    "/v1/completions/render": {"prompt": ["Hello", "There"]},
    "/v1/completions/derender": {"generate_responses": [TOKENS]},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 2},
    "/v1/responses/render": {"input": "Hello"},
    "/v1/responses/input_tokens": {"input": "Hello"},
    "/v1/responses/compact": {"input": "Hello", "max_output_tokens": 8},
    "/v1/conversations": {"items": [{"role": "user", "content": "Hello"}]},
    "/v1/messages": {"model": MODEL, "messages": TEXT, "max_tokens": 2},
    "/v1/messages/render": {"model": MODEL, "messages": TEXT, "max_tokens": 2},
    "/v1/messages/count_tokens": {"model": MODEL, "messages": TEXT},
    "/invocations": {"prompt": "Hello", "max_tokens": 2},
    "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}},
    "/inference/v1/abort_requests": {"request_ids": ["nobody"]},
    "/v1/decisions": {"model": MODEL, "input": "Hello", "questions": [{"type": "predicate", "instructions": "True?"}]},
    "/v1/systemone": {"state": "Hello", "questions": {"a": {"type": "choice", "criteria": {"b": None}}}},
    "/generative_scoring": {"query": [5], "items": [[6]], "label_token_ids": [7, 8]},
    "/tokenize": {"messages": TEXT},
    "/detokenize": {"tokens": [5]},
    "/decode": {"ids": [5]},
}
"""What every operation with a body answers with 200, but for those on one conversation that the server keeps."""

GOOD_VECTORS: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": ["Hello", "There"]},
    "/embeddings": {"input": "Hello"},
    "/pooling": {"input": "Hello"},
    "/score": {"text_1": "Hello", "text_2": ["There", "Hello"]},
    "/v1/score": {"text_1": "Hello", "text_2": "There"},
    "/rerank": {"query": "Hello", "documents": ["There"]},
    "/v1/rerank": {"query": "Hello", "documents": ["There"]},
    "/v2/rerank": {"query": "Hello", "documents": ["There"]},
    "/v2/embed": {"texts": ["Hello"]},
    "/embed": {"inputs": ["Hello"]},
    "/embed_all": {"inputs": "Hello"},
    "/similarity": {"inputs": {"source_sentence": "Hello", "sentences": ["There"]}},
    "/": {"inputs": "Hello"},
    "/vertex": {"instances": [{"inputs": "Hello"}]},
}
"""The same of a server that makes vectors."""

GOOD_LABELS: dict[str, dict[str, Any]] = {"/classify": {"input": "Hello"}, "/predict": {"inputs": [["Hello"]]}}
"""And of one that gives labels."""

FORMS = {"/v1/audio/transcriptions", "/v1/audio/translations"}
"""For servers of models that hear: see the tests of sounds."""

SPARSE = "/embed_sparse"
"""For servers of sparse vectors: see the tests of Text Embeddings Inference."""

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]

LIMITS = {"max_tokens": 2, "max_completion_tokens": 2, "max_output_tokens": 2, "n": 3}
"""Values that these fields are lowered to: what more of the same costs is not asked here."""
SECONDS = 60
"""The time that each request has."""


class Caller:
    """Sends cases, and checks every answer against the document."""

    def __init__(self, base_url: str, session: requests.Session) -> None:
        self._base_url = base_url
        self._session = session
        self.statuses: list[int] = []

    def __call__(self, case: Case, *, must_fail: bool = False) -> None:
        if isinstance(case.body, dict):
            for name, limit in LIMITS.items():
                value = case.body.get(name)
                if isinstance(value, int) and value > limit:
                    case.body[name] = limit
            if isinstance(timeout := case.body.get("timeout"), float | int) and 0 < timeout < SECONDS:
                case.body["timeout"] = SECONDS  # a shorter one may pass before the answer, which then is a 504
            if not must_fail:  # without a limit, an answer is as long as the context
                good = GOOD.get(case.path, {})
                case.body = {name: good[name] for name in LIMITS if name in good} | case.body
        response = case.call(base_url=self._base_url, session=self._session, timeout=SECONDS)
        checks = [*CHECKS, negative_data_rejection] if must_fail else list(CHECKS)
        kind = str(response.headers.get("content-type"))
        if "text/event-stream" in kind or "octet-stream" in kind:
            checks.remove(response_schema_conformance)  # it takes events and bytes for JSON
        case.validate_response(response, checks=checks)
        self.statuses.append(response.status_code)


@pytest.fixture(scope="module")
def document(demo_server: ServerProcess) -> dict[str, Any]:
    document: dict[str, Any] = httpx.get(demo_server.base_url + "/openapi.json").raise_for_status().json()
    return document


@pytest.fixture(scope="module")
def operations(document: dict[str, Any]) -> dict[str, Any]:
    """All operations: "POST /v1/completions" and so on."""
    found = [each.ok() for each in schemathesis.openapi.from_dict(document).get_all_operations()]
    return {operation.label: operation for operation in found}


@pytest.fixture
def call(demo_server: ServerProcess) -> Iterator[Caller]:
    with requests.Session() as session:
        caller = Caller(demo_server.base_url, session)
        yield caller
    assert "Traceback" not in demo_server.logs()


def examples(count: int) -> Any:
    """Generates the same examples in every run."""
    return settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )


def test_every_operation_is_described(document: dict[str, Any]) -> None:
    bodies = {path for path, operations in document["paths"].items() if "requestBody" in operations.get("post", {})}
    assert {path for path in bodies if "{" not in path} == {*GOOD, *GOOD_VECTORS, *GOOD_LABELS, SPARSE, *FORMS}
    schemas = document["components"]["schemas"]
    chat = schemas["ChatRequest"]
    assert "additionalProperties" not in chat
    assert chat["required"] == ["messages"]
    assert chat["properties"]["vllm_xargs"]["anyOf"][0]["additionalProperties"]["anyOf"]  # an integer is a number, too
    streams = {
        path
        for path, operations in document["paths"].items()
        for operation in operations.values()
        if "text/event-stream" in operation["responses"]["200"].get("content", {})
    }
    assert {"/v1/completions", "/v1/responses", "/v1/responses/{response_id}", "/v1/messages"} <= streams
    assert streams >= FORMS
    assert not {"/v1/models", "/v1/responses/input_tokens", "/v1/responses/compact"} & streams
    for path in FORMS:
        [(kind, body)] = document["paths"][path]["post"]["requestBody"]["content"].items()
        fields = body["schema"]["properties"]
        assert (kind, body["schema"]["required"]) == ("multipart/form-data", ["file"])
        assert fields["file"] == {"type": "string", "format": "binary"}
        assert "srt" in fields["response_format"]["enum"]


@pytest.mark.parametrize("mode", GenerationMode)
@pytest.mark.parametrize("path", GOOD)
def test_bodies_that_the_document_allows_or_forbids(
    operations: dict[str, Any], call: Caller, path: str, mode: GenerationMode
) -> None:
    operation = operations[f"POST {path}"]

    @examples(NUM_EXAMPLES)
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Case) -> None:
        call(case, must_fail=mode is GenerationMode.NEGATIVE)

    send()
    assert len(call.statuses) > 1


def test_operations_without_an_input_that_could_be_wrong(operations: dict[str, Any], call: Caller) -> None:
    for operation in operations.values():
        if operation.method == "post" and operation.path in {*GOOD, *GOOD_VECTORS, *GOOD_LABELS, SPARSE, *FORMS}:
            continue  # tried above, or for servers of other models

        @examples(NUM_EXAMPLES)
        @given(case=operation.as_strategy())
        def send(case: Case) -> None:
            call(case)

        send()
    assert len(call.statuses) > 50


@pytest.mark.turns(1)
@pytest.mark.parametrize("path", GOOD)
def test_good_requests(operations: dict[str, Any], call: Caller, path: str) -> None:
    call(operations[f"POST {path}"].Case(body=deepclone(GOOD[path]), media_type="application/json"))
    assert call.statuses == [200]


@pytest.mark.parametrize("num_fields", [1, 3])
@pytest.mark.parametrize("path", GOOD)
def test_good_requests_with_some_of_the_fields_that_the_document_allows(
    operations: dict[str, Any], call: Caller, path: str, num_fields: int
) -> None:
    """Most requests that a schema allows fail the server's first check. These requests reach later checks."""

    @examples(NUM_EXAMPLES)
    @given(case=operations[f"POST {path}"].as_strategy().filter(lambda case: isinstance(case.body, dict)))
    def send(case: Case) -> None:
        case.body = with_fields(GOOD[path], case.body, num_fields)
        call(case)

    send()
    assert 200 in call.statuses


def with_fields(good: dict[str, Any], drawn: dict[str, Any], count: int) -> dict[str, Any]:
    """`good` with `count` fields of `drawn`, the same fields in every run."""
    names = sorted(name for name, value in drawn.items() if value is not None and name not in good)
    chosen = random.Random(repr(names)).sample(names, min(count, len(names)))
    return {**deepclone(good), **{name: drawn[name] for name in chosen}}


@pytest.mark.parametrize(
    ("kind", "path"), [*(("embedding", path) for path in GOOD_VECTORS), *(("labelling", path) for path in GOOD_LABELS)]
)
def test_bodies_for_servers_of_vectors_and_labels(
    request: pytest.FixtureRequest, operations: dict[str, Any], kind: str, path: str
) -> None:
    server: ServerProcess = request.getfixturevalue(f"{kind}_server")
    body = (GOOD_VECTORS | GOOD_LABELS)[path]
    assert requests.post(server.base_url + path, json=body, timeout=60).status_code == 200
    with requests.Session() as session:
        call = Caller(server.base_url, session)
        for mode in GenerationMode:
            send_bodies(operations[f"POST {path}"], call, mode, body)
    assert "Traceback" not in server.logs()


def send_bodies(operation: Any, call: Caller, mode: GenerationMode, good: dict[str, Any]) -> None:
    """Sends bodies as they are drawn, and good ones with a drawn field."""

    @examples(NUM_EXAMPLES)
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Case) -> None:
        call(case, must_fail=mode is GenerationMode.NEGATIVE)
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            case.body = with_fields(good, case.body, 1)
            call(case)

    send()
