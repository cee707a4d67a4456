"""Every field of a request is honoured, refused by name, or known to be harmless."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from quire.core.errors import EngineError, ParameterError
from quire.core.sampling_params import RequestOutputKind
from quire.frontend.json_request import decode_body
from quire.frontend.openai.generation import choose_id, engine_id, log_prompt, merge
from quire.frontend.openai.schema import HARMLESS, UNSUPPORTED, ChatRequest, CompletionRequest, GenerationRequest

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
TEXT: dict[str, Any] = {"prompt": "a"}
KINDS: list[tuple[type[GenerationRequest], dict[str, Any]]] = [(ChatRequest, CHAT), (CompletionRequest, TEXT)]
FIELDS = [(kind, body, name) for kind, body in KINDS for name in kind.__struct_fields__]


def read(kind: type[GenerationRequest], body: dict[str, Any]) -> Any:
    request = decode_body(msgspec.json.encode(body), kind)
    request.check()
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
    for nothing in UNSUPPORTED[name]:
        read(kind, {**body, name: nothing})
    with pytest.raises(ParameterError, match=f"{name} is not supported yet") as caught:
        read(kind, {**body, name: {"some": "thing"}})
    assert caught.value.param == name


def test_tables_name_fields_that_exist() -> None:
    fields = {name for _, _, name in FIELDS}
    assert set(UNSUPPORTED) <= fields
    assert set(HARMLESS) <= fields


def test_sampling_takes_the_request_then_the_model_then_our_defaults() -> None:
    request = read(ChatRequest, {**CHAT, "temperature": 0.5, "stop": ["x"], "n": 2})
    sampling = request.make_sampling({"temperature": 0.9, "top_p": 0.8}, max_tokens=7, logprobs=None)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.8, 0)
    assert (sampling.stop, sampling.n, sampling.max_tokens) == (["x"], 2, 7)
    assert sampling.output_kind is RequestOutputKind.FINAL_ONLY
    streamed = read(ChatRequest, {**CHAT, "stream": True}).make_sampling({}, max_tokens=1, logprobs=None)
    assert streamed.output_kind is RequestOutputKind.DELTA


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
    request = read(CompletionRequest, {**TEXT, "request_id": "mine"})
    assert choose_id("cmpl", request, "theirs") == "cmpl-theirs"
    assert choose_id("cmpl", request, None) == "cmpl-mine"
    fresh = read(CompletionRequest, TEXT)
    assert choose_id("cmpl", fresh, None) != choose_id("cmpl", fresh, None)
    assert len(choose_id("cmpl", fresh, "x" * 10_000)) < 300
    assert engine_id("cmpl-mine") != engine_id("cmpl-mine")


def test_logged_prompts_are_cut(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="quire.frontend.openai.generation"):
        log_prompt("r", "abcdef", 3)
        log_prompt("r", [1, 2, 3], 2)
        log_prompt("r", "abcdef", None)
    assert [record.args for record in caplog.records] == [("r", "abc"), ("r", [1, 2]), ("r", "abcdef")]


class Stream:
    """Stands in for one prompt's outputs."""

    def __init__(self, *items: Any) -> None:
        self._items = items

    async def __aiter__(self) -> AsyncIterator[Any]:
        for item in self._items:
            await asyncio.sleep(0)
            if isinstance(item, Exception):
                raise item
            yield item


def collect(*streams: Stream) -> list[tuple[int, Any]]:
    async def main() -> list[tuple[int, Any]]:
        return [item async for item in merge(streams)]  # type: ignore[arg-type]

    return asyncio.run(main())


def test_merge_keeps_each_prompts_order() -> None:
    merged = collect(Stream(1, 2, 3), Stream(), Stream(4, 5))
    assert [item for index, item in merged if index == 0] == [1, 2, 3]
    assert [item for index, item in merged if index == 2] == [4, 5]
    assert len(merged) == 5
    assert collect(Stream(1, 2)) == [(0, 1), (0, 2)]


def test_merge_raises_what_a_stream_raises() -> None:
    with pytest.raises(EngineError, match="down"):
        collect(Stream(1, 2, 3), Stream(EngineError("down")))
    with pytest.raises(EngineError, match="down"):
        collect(Stream(EngineError("down")))
