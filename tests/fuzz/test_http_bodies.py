"""Bodies of HTTP requests: an answer in each case, and never that of an unexpected error."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.frontend.async_llm import AsyncLLM
from tests.frontend.http.test_app import Caller
from tests.fuzz.examples import altered, fuzzed, mutated

MESSAGES = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "model": "tiny", "prompt": "Hello", "max_tokens": -1, "temperature": 0.5, "logprobs": 2, "stop": ["x"],
        "logit_bias": {"5": 1.0}, "n": 2, "stream": True, "stream_options": {"include_usage": True},
    },
    "/v1/chat/completions": {
        "model": "tiny", "messages": MESSAGES, "max_tokens": -1, "tools": [TOOL], "tool_choice": "auto",
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
        "structured_outputs": {"regex": "a"}, "chat_template_kwargs": {"a": 1},
    },
    "/v1/responses": {"model": "tiny", "input": "Hello", "max_output_tokens": -1, "text": {"format": {"type": "text"}}},
    "/v1/messages": {"model": "tiny", "messages": MESSAGES, "max_tokens": -1, "system": "x", "tools": []},
    "/tokenize": {"model": "tiny", "prompt": "Hello", "add_special_tokens": True},
    "/detokenize": {"model": "tiny", "tokens": [1, 2, 3]},
}  # fmt: skip


@pytest.fixture(scope="module")
def call(checkpoint: Callable[..., Path]) -> Iterator[Caller]:
    """An application whose engine never starts: what a body asks for is read and refused before."""
    caller = Caller(AsyncLLM.from_engine_args(model=str(checkpoint("llama")), served_model_name="tiny"))
    yield caller
    caller.close()


def check(call: Caller, path: str, body: bytes) -> None:
    answer = call("POST", path, content=body, headers={"Content-Type": "application/json"})
    expected = answer.status_code < 500 or "engine" in answer.text
    assert expected, f"{path} {body!r}: {answer.status_code} {answer.text}"
    if answer.headers["Content-Type"].startswith("application/json"):
        json.loads(answer.text)


@pytest.mark.parametrize("path", BODIES)
def test_altered_bodies(call: Caller, path: str) -> None:
    @fuzzed(40)
    @given(altered(BODIES[path]))
    def run(body: dict[str, Any]) -> None:
        check(call, path, json.dumps(body).encode())

    run()


@pytest.mark.parametrize("path", BODIES)
def test_broken_bodies(call: Caller, path: str) -> None:
    @fuzzed(20)
    @given(st.one_of(st.binary(max_size=60), mutated(json.dumps(BODIES[path]).encode())))
    def run(body: bytes) -> None:
        check(call, path, body)

    run()
