"""A format's parser reads every text that the format's grammar accepts: both come from one description."""

from typing import Any

import jsonschema
import pytest

from quire.frontend.parsing.call_tags import call_list_schema
from quire.frontend.parsing.harmony import Harmony
from quire.frontend.parsing.parsers import OutputParsers, find_tool_parser
from quire.frontend.parsing.structure import tool_call_schema, tool_call_structure
from quire.frontend.parsing.tool_formats import TOOL_FORMATS
from quire.frontend.parsing.tools import Tool, ToolChoice
from tests.frontend.parsing.rendered_calls import Call, render
from tests.frontend.parsing.test_tool_parsers import decoded, parse

xgrammar = pytest.importorskip("xgrammar")

TOOLS = [
    Tool(
        name="get_weather",
        parameters={
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    ),
    Tool(
        name="move",
        parameters={
            "type": "object",
            "properties": {"to": {"$ref": "#/$defs/Point"}},
            "required": ["to"],
            "additionalProperties": False,
            "$defs": {
                "Point": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
            },
        },
    ),
]
WEATHER: Call = ("get_weather", {"city": "Paris", "days": 3})
WEATHER_WRONG: Call = ("get_weather", {"city": "Paris", "days": "three"})
MOVE: Call = ("move", {"to": {"x": 1}})
REQUIRED = ToolChoice(mode="required")

FORMATS = [*TOOL_FORMATS, "openai"]
WITHOUT = {"functiongemma", "gemma4", "k2_horizon", "lfm2", "llama4_pythonic"}
WITHOUT |= {"minicpm5", "muse_glimmer", "olmo3", "pythonic", "step3"}
WITH = [name for name in FORMATS if name not in WITHOUT]
SINGLE = {"openai"}


def accepts(tag: dict[str, Any], text: str) -> bool:
    """Whether the whole `text` matches the structural tag."""
    tokens = [bytes([byte]) for byte in range(256)] + [b"</s>"]
    info = xgrammar.TokenizerInfo(tokens, xgrammar.VocabType.RAW, stop_token_ids=[256])
    compiled = xgrammar.GrammarCompiler(info).compile_grammar(xgrammar.Grammar.from_structural_tag(tag))
    matcher = xgrammar.GrammarMatcher(compiled)
    return bool(matcher.accept_string(text) and matcher.is_completed())


def structure(name: str, choice: ToolChoice, tools: list[Tool] = TOOLS) -> dict[str, Any] | None:
    form = find_tool_parser(name)
    assert not isinstance(form, type)
    assert form is not None
    return tool_call_structure(form, tools, choice)


def written(name: str, calls: list[Call]) -> str:
    text = render(find_tool_parser(name), calls)
    if isinstance(find_tool_parser(name), Harmony):
        return text.removeprefix("<|start|>assistant").removesuffix("<|call|>")
    return text


@pytest.mark.parametrize("name", WITH)
def test_required_calls_follow_the_grammar(name: str):
    tag = structure(name, REQUIRED)
    assert tag is not None
    for calls in [WEATHER], [MOVE], [WEATHER, MOVE]:
        if name in SINGLE and len(calls) > 1:
            continue
        text = written(name, calls)
        assert accepts(tag, text), text
        assert decoded(parse(OutputParsers(name), [text], choice=REQUIRED, tools=TOOLS)) == calls
    assert not accepts(tag, written(name, [WEATHER_WRONG]))
    assert not accepts(tag, "It will rain.")
    assert not accepts(tag, "")
    assert not accepts(tag, written(name, [("ping", {})]))


@pytest.mark.parametrize("name", WITH)
def test_a_named_call_is_the_only_one(name: str):
    choice = ToolChoice(mode="named", name="move")
    tag = structure(name, choice)
    assert tag is not None
    assert accepts(tag, written(name, [MOVE]))
    assert not accepts(tag, written(name, [WEATHER]))
    assert not accepts(tag, written(name, [MOVE, MOVE]))


@pytest.mark.parametrize("name", WITH)
def test_one_call_when_calls_may_not_be_parallel(name: str):
    tag = structure(name, ToolChoice(mode="required", max_calls=1))
    assert tag is not None
    assert accepts(tag, written(name, [WEATHER]))
    assert not accepts(tag, written(name, [WEATHER, MOVE]))


@pytest.mark.parametrize("name", [name for name in WITH if name != "xlam"])
def test_strict_functions_are_constrained_where_the_model_chooses(name: str):
    strict = [Tool(name=tool.name, parameters=tool.parameters, strict=True) for tool in TOOLS]
    assert structure(name, ToolChoice()) is None
    tag = structure(name, ToolChoice(), strict)
    assert tag is not None
    assert accepts(tag, "It will rain.")
    assert accepts(tag, written(name, [WEATHER]))
    assert not accepts(tag, written(name, [WEATHER_WRONG]))


def test_notations_without_a_grammar_have_a_schema():
    for name in WITHOUT:
        assert structure(name, REQUIRED) is None
        constraint = OutputParsers(name).constraint(TOOLS, REQUIRED)
        assert constraint is not None
        assert constraint.json_schema == tool_call_schema(TOOLS, REQUIRED)
    assert OutputParsers("hermes").constraint(TOOLS, ToolChoice()) is None
    assert OutputParsers("hermes").constraint(TOOLS, ToolChoice(mode="none")) is None
    assert OutputParsers("hermes").constraint([], REQUIRED) is None


def test_references_stay_whole_in_a_list_of_calls():
    schema = call_list_schema({tool.name: tool.parameters or {} for tool in TOOLS})
    good = [{"name": "move", "parameters": {"to": {"x": 1}}}]
    jsonschema.validate(good, schema)
    for bad in [], [{"name": "move", "parameters": {"to": {}}}], [{"name": "get_weather", "parameters": {"to": {}}}]:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, schema)
