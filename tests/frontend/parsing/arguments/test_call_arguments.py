"""Arguments of calls in every format: JSON whatever the model wrote, each once, of the schema's types."""

import json
from typing import Any

import pytest

from quire.frontend.parsing.answers.parsers import OutputParsers
from quire.frontend.parsing.formats.tool_formats import TOOL_FORMATS
from quire.frontend.parsing.shapes.attribute_calls import AttributeCalls
from quire.frontend.parsing.shapes.json_calls import JsonCalls
from quire.frontend.parsing.shapes.keyed_calls import KeyedCalls
from quire.frontend.parsing.shapes.named_calls import NamedCalls
from quire.frontend.parsing.shapes.xml_calls import XmlCalls
from quire.frontend.parsing.tools import Tool
from tests.frontend.parsing.rendered_calls import render
from tests.frontend.parsing.test_tool_parsers import Parsed, decoded, parse

ADDRESS = {"type": "object", "properties": {"zip": {"type": "string"}, "floor": {"type": "integer"}}}
TOOLS = [
    Tool(name="send", parameters={**ADDRESS, "properties": {**ADDRESS["properties"], "to": {"$ref": "#/$defs/A"}},  # type: ignore[dict-item]
                                  "$defs": {"A": ADDRESS}}),
    Tool(name="ping", parameters={"type": "object", "properties": {"x": {"type": "string"}}}),
]  # fmt: skip

JSON = sorted(
    name
    for name, form in TOOL_FORMATS.items()
    if isinstance(form, JsonCalls | KeyedCalls) or (isinstance(form, NamedCalls) and form.notation is None)
)
TAGGED = sorted(name for name, form in TOOL_FORMATS.items() if isinstance(form, XmlCalls | AttributeCalls))


def cut(name: str, text: str) -> Parsed:
    """The text parsed whole, which is also how it is parsed by characters."""
    whole = parse(OutputParsers(name), [text], tools=TOOLS)
    assert parse(OutputParsers(name), list(text), tools=TOOLS) == whole
    return whole


@pytest.mark.parametrize("name", [*JSON, "openai"])
def test_an_object_that_is_no_json_is_text_and_no_call(name: str):
    form = TOOL_FORMATS.get(name)
    whole = '<|channel|>commentary to=functions.ping<|message|>{"x": "1"}<|call|>'
    text = render(form, [("ping", {"x": "1"})]) if form else whole
    assert '{"x": "1"}' in text
    parsed = cut(name, "So: " + text.replace('{"x": "1"}', "{invalid json}"))
    assert parsed.calls == []
    assert parsed.text.startswith("So:")
    assert "{invalid json}" in parsed.text


@pytest.mark.parametrize("name", [*JSON, "openai"])
@pytest.mark.parametrize(
    ("written", "read"),
    [
        ('{"x": "1", oops}', {"x": "1"}),
        ('{"x": "1",}', {"x": "1"}),
        ('{"x": True}', {"x": True}),
        ('{"x": "a\nb\\d"}', {"x": "a\nb\\d"}),
    ],
)
def test_an_object_with_a_mistake_is_mended(name: str, written: str, read: Any):
    form = TOOL_FORMATS.get(name)
    whole = '<|channel|>commentary to=functions.ping<|message|>{"x": "1"}<|call|>'
    text = render(form, [("ping", {"x": "1"})]) if form else whole
    parsed = cut(name, text.replace('{"x": "1"}', written))
    assert decoded(parsed) == [("ping", read)]


@pytest.mark.parametrize("name", ["hermes", "apertus", "kimi_k2", "deepseek_v31"])
def test_braces_that_miss_before_the_calls_end_are_added(name: str):
    text = render(TOOL_FORMATS[name], [("send", {"to": {"zip": "1"}})])
    parsed = cut(name, text.replace('{"zip": "1"}}', '{"zip": "1"'))
    assert decoded(parsed) == [("send", {"to": {"zip": "1"}})]


@pytest.mark.parametrize(("name", "call"), [
    ("pythonic", "[ping(x='1', y={'a': [1, oops]})]"),
    ("gemma4", '<|tool_call>call:ping{x:<|"|>1<|"|>,y:{a:[1,}<tool_call|>'),
])  # fmt: skip
def test_literals_with_a_mistake_are_mended(name: str, call: str):
    assert decoded(cut(name, call)) == [("ping", {"x": "1", "y": {"a": [1]}})]


# ---------------------------------------------------------------------------------------------------------- duplicates


@pytest.mark.parametrize("name", TAGGED)
def test_an_argument_that_is_written_twice_counts_once(name: str):
    """The first one, which a stream has told by then."""
    text = render(TOOL_FORMATS[name], [("ping", {"x": "1", "X": "2"})]).replace('"X"', '"x"')
    for opening in ("=X>", ">X<"):
        text = text.replace(opening, opening.replace("X", "x"))
    [(called, arguments)] = cut(name, text).calls
    assert (called, json.loads(arguments, object_pairs_hook=list)) == ("ping", [("x", "1")])


@pytest.mark.parametrize(("name", "call"), [
    ("pythonic", "[ping(x='1', x='2')]"),
    ("lfm2", "<|tool_call_start|>[ping(x='1', x='2')]<|tool_call_end|>"),
    ("gemma4", '<|tool_call>call:ping{x:<|"|>1<|"|>,x:<|"|>2<|"|>}<tool_call|>'),
    ("functiongemma", "<start_function_call>call:ping{x:<escape>1<escape>,x:<escape>2<escape>}<end_function_call>"),
])  # fmt: skip
def test_so_does_a_literal(name: str, call: str):
    [(called, arguments)] = cut(name, call).calls
    assert (called, json.loads(arguments, object_pairs_hook=list)) == ("ping", [("x", "1")])


# ----------------------------------------------------------------------------------------------------- unclosed openers


@pytest.mark.parametrize("name", sorted({*TAGGED} - {"kimi_k3"}))
def test_the_opener_of_another_call_ends_the_one_before(name: str):
    form = TOOL_FORMATS[name]
    assert isinstance(form, XmlCalls | AttributeCalls)
    first, second = (render(form, [call]) for call in (("send", {}), ("ping", {"x": "1"})))
    end = form.call.end if isinstance(form, AttributeCalls) else form.call_end
    grouped = form.section is not None and (isinstance(form, AttributeCalls) or form.grouped or bool(form.wrapper[0]))
    begin = form.call.begin if isinstance(form, AttributeCalls) else form.wrapper[0] + form.call_begin
    unclosed = first[: first.rindex(end)].rstrip()
    parsed = cut(name, unclosed + "\n" + (second[second.index(begin) :] if grouped else second))
    assert decoded(parsed)[-1] == ("ping", {"x": "1"})
    assert decoded(parsed)[:-1] in ([], [("send", {})])


# --------------------------------------------------------------------------------------------------------------- types


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("gemma4", '<|tool_call>call:send{zip:90210,floor:<|"|>3<|"|>,to:{zip:007,floor:4}}<tool_call|>'),
        (
            "functiongemma",
            "<start_function_call>call:send{zip:90210,floor:<escape>3<escape>,to:{zip:<escape>007<escape>,floor:4}}"
            "<end_function_call>",
        ),
        (
            "k2_horizon",
            '<ifm|tool_calls><ifm|tool_call>{"name": "send", "arguments": {"zip": 90210, "floor": "3", "to": '
            '{"zip": "007", "floor": 4}}}</ifm|tool_call></ifm|tool_calls>',
        ),
    ],
)
def test_values_have_the_types_of_the_schema(name: str, call: str):
    address = {"zip": "007", "floor": 4}
    assert decoded(cut(name, call)) == [("send", {"zip": "90210", "floor": 3, "to": address})]


def test_without_a_schema_a_literal_is_what_it_looks_like():
    call = '<|tool_call>call:other{zip:90210,name:<|"|>5<|"|>,on:true,word:Paris}<tool_call|>'
    assert decoded(cut("gemma4", call)) == [("other", {"zip": 90210, "name": "5", "on": True, "word": "Paris"})]
