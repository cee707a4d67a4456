"""A format's parser reads every text that the format's grammar accepts: both come from one description."""

import json
import re
from typing import Any

import jsonschema
import pytest
import xgrammar

from quire.core.errors import ParameterError
from quire.core.wire.protocol import Vocabulary
from quire.frontend.grammar.backends.xgrammar_backend import XGrammarBackend
from quire.frontend.grammar.constraint import Constraint
from quire.frontend.grammar.schema import LARK
from quire.frontend.parsing.answers.parsers import OutputParsers
from quire.frontend.parsing.answers.registry import find_tool_parser
from quire.frontend.parsing.answers.structure import tool_call_schema, tool_call_structure
from quire.frontend.parsing.formats.checkpoint_marks import CheckpointMarks
from quire.frontend.parsing.formats.harmony import Harmony
from quire.frontend.parsing.formats.tool_formats import TOOL_FORMATS
from quire.frontend.parsing.shapes.call_tags import call_list_schema
from quire.frontend.parsing.tools import Tool, ToolChoice
from tests.frontend.parsing.formats.test_checkpoint_marks import PATTERNED
from tests.frontend.parsing.rendered_calls import Call, render
from tests.frontend.parsing.tag_matching import INFO, TOKENS, accepts
from tests.frontend.parsing.test_tool_parsers import decoded, parse

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
BACKEND = XGrammarBackend(Vocabulary(TOKENS, [256]))

FORMATS = [*TOOL_FORMATS, "openai"]
UNTRIGGERED = {"pythonic", "xlam"}
"""Calls may begin with a bracket or a fence, as any text may."""
SINGLE = {"openai"}


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


@pytest.mark.parametrize("name", FORMATS)
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


@pytest.mark.parametrize("name", FORMATS)
def test_a_named_call_is_the_only_one(name: str):
    choice = ToolChoice(mode="named", name="move")
    tag = structure(name, choice)
    assert tag is not None
    assert accepts(tag, written(name, [MOVE]))
    assert not accepts(tag, written(name, [WEATHER]))
    assert not accepts(tag, written(name, [MOVE, MOVE]))


@pytest.mark.parametrize("name", FORMATS)
def test_one_call_when_calls_may_not_be_parallel(name: str):
    tag = structure(name, ToolChoice(mode="required", max_calls=1))
    assert tag is not None
    assert accepts(tag, written(name, [WEATHER]))
    assert not accepts(tag, written(name, [WEATHER, MOVE]))


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in UNTRIGGERED])
def test_strict_functions_are_constrained_where_the_model_chooses(name: str):
    strict = [Tool(name=tool.name, parameters=tool.parameters, strict=True) for tool in TOOLS]
    assert structure(name, ToolChoice()) is None
    tag = structure(name, ToolChoice(), strict)
    assert tag is not None
    assert accepts(tag, "It will rain.")
    assert accepts(tag, written(name, [WEATHER]))
    assert not accepts(tag, written(name, [WEATHER_WRONG]))


# ------------------------------------------------------------------------------- formats whose arguments are not JSON

PYTHONIC = {"lfm2", "llama4_pythonic", "olmo3"}
OWN = sorted(PYTHONIC | {"functiongemma", "gemma4", "k2_horizon", "minicpm5", "muse_glimmer", "step3"})
PAINT = Tool(
    name="paint",
    strict=True,
    parameters={
        "type": "object",
        "properties": {
            "note": {"type": ["string", "null"], "description": "free"},
            "color": {"anyOf": [{"type": "string", "enum": ["red", "<b>"]}, {"type": "null"}]},
            "code": {"type": "string", "pattern": "^[A-Z]{2}$"},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
            "size": {"$ref": "#/$defs/Size"},
            "dry": {"type": "boolean"},
        },
        "required": ["color", "tags"],
        "additionalProperties": False,
        "$defs": {
            "Size": {
                "type": "object",
                "properties": {"w": {"type": "number"}, "h": {"type": "integer"}},
                "required": ["w"],
                "additionalProperties": False,
            }
        },
    },
)
OTHERS = [Tool(name="stop", strict=True, parameters={"type": "object", "properties": {}}), Tool(name="anything")]
FITTING: list[Call] = [
    ("paint", {"color": "red", "tags": []}),
    ("paint", {"color": "<b>", "tags": ["a", "it's"]}),
    ("paint", {"color": None, "tags": ["a"], "size": {"w": 1.5, "h": 2}, "dry": True}),
    ("paint", {"note": "a (b) c", "color": "red", "code": "AB", "tags": [], "dry": False}),
    ("stop", {}),
    ("anything", {}),
    ("anything", {"a": "x (y)", "b": 5, "c": "<i>"}),
]
WRONG: list[Call] = [
    ("paint", {"color": "red"}),
    ("paint", {"tags": []}),
    ("paint", {"color": "blue", "tags": []}),
    ("paint", {"color": "red", "tags": ["a"] * 4}),
    ("paint", {"color": "red", "tags": [1]}),
    ("paint", {"color": "red", "code": "A", "tags": []}),
    ("paint", {"color": "red", "tags": [], "size": {"h": 1}}),
    ("paint", {"color": "red", "tags": [], "dry": "yes"}),
    ("paint", {"color": "red", "tags": [], "other": 1}),
    ("stop", {"now": True}),
]


INHERITED = Tool(
    name="rate",
    strict=True,
    parameters={
        "allOf": [
            {"$ref": "#/$defs/A%20Place"},
            {"type": "object", "properties": {"stars": {"$ref": "#/$defs/x~1y"}}, "required": ["stars"]},
        ],
        "propertyNames": {"type": "string"},
        "unevaluatedProperties": False,
        "$defs": {
            "A Place": {
                "type": "object",
                "properties": {
                    "zip": {"allOf": [{"$ref": "#/$defs/Zip"}], "description": "five digits"},
                    "votes": {
                        "type": "object",
                        "properties": {"up": {"type": "integer"}},
                        "propertyNames": {"type": "string"},
                        "required": ["up"],
                        "additionalProperties": False,
                    },
                },
                "required": ["zip", "votes"],
            },
            "Zip": {"type": "string"},
            "x/y": {"type": "integer"},
        },
    },
)


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in UNTRIGGERED])
def test_schemas_in_parts_are_enforced_in_every_format(name: str):
    """The schema of OpenAPI's inheritance, percent-encoded names, and what zod writes of records."""
    tag = structure(name, ToolChoice(), [INHERITED])
    assert tag is not None
    constraint = Constraint(kind="structural_tag", text=json.dumps(tag), backends=("xgrammar",), closed=True)
    grammar = xgrammar.CompiledGrammar.deserialize_json(BACKEND.compile(constraint).decode(), INFO)

    def fits(text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(grammar)
        return bool(matcher.accept_string(text) and matcher.is_completed())

    right: Call = ("rate", {"zip": "90210", "votes": {"up": 1}, "stars": 5})
    assert fits(written(name, [right]))
    assert decoded(parse(OutputParsers(name), [written(name, [right])], tools=[INHERITED])) == [right]
    for wrong in ({"stars": "many"}, {"votes": {"up": "x"}}, {"votes": {}}):
        assert not fits(written(name, [("rate", {**right[1], **wrong})])), wrong


@pytest.mark.parametrize("name", OWN)
def test_each_keyword_is_enforced_where_the_model_chooses(name: str):
    tools = [PAINT, *OTHERS]
    tag = structure(name, ToolChoice(), tools)
    assert tag is not None

    def text_of(call: Call) -> str:
        text = "Well. " + written(name, [call])
        return re.sub(r"'(A|AB)'", r'"\1"', text) if name in PYTHONIC else text  # patterns hold for JSON's notation

    for call in FITTING:
        assert accepts(tag, text_of(call)), text_of(call)
        assert decoded(parse(OutputParsers(name), [text_of(call)], tools=tools)) == [call]
    for call in WRONG:
        assert not accepts(tag, text_of(call)), text_of(call)


@pytest.mark.parametrize("name", OWN)
def test_a_custom_tools_grammar_is_enforced_where_the_model_chooses(name: str):
    schema = {"type": "object", "properties": {"input": {"type": "string", LARK: 'start: "a" "<"+'}}}
    schema |= {"required": ["input"], "additionalProperties": False}
    tool = Tool(name="run", strict=True, parameters=schema)
    constraint = OutputParsers(name).constraint([tool], ToolChoice())
    assert constraint is not None
    text = json.dumps(constraint.structural_tag)
    compiled = BACKEND.compile(Constraint(kind="structural_tag", text=text, backends=("xgrammar",), closed=True))
    for given, fits in (("a<<", True), ("a", False), ("b<", False)):
        written_call = "Hm. " + written(name, [("run", {"input": given})])
        if name in PYTHONIC:
            written_call = written_call.replace("'", '"')
        written_call = written_call.replace("&lt;", "<")
        matcher = xgrammar.GrammarMatcher(xgrammar.CompiledGrammar.deserialize_json(compiled.decode(), INFO))
        assert (matcher.accept_string(written_call) and matcher.is_completed()) is fits, written_call
        if fits:
            assert decoded(parse(OutputParsers(name), [written_call], tools=[tool])) == [("run", {"input": given})]


@pytest.mark.parametrize("name", [*sorted(UNTRIGGERED), "olmo3", "hf"])
def test_what_cannot_be_enforced_where_the_model_chooses_is_refused(name: str):
    marks = CheckpointMarks(PATTERNED) if name == "hf" else None
    schema = {"type": "object", "patternProperties": {"a": {"type": "integer"}}}
    strict, loose = Tool(name="f", strict=True, parameters=schema), Tool(name="f", parameters=schema)
    parsers = OutputParsers(name, checkpoint=marks)
    with pytest.raises(ParameterError, match=r"'f'.*strict.*tool_choice") as caught:
        parsers.constraint([strict], ToolChoice())
    assert caught.value.param == "tools"
    assert parsers.constraint([loose], ToolChoice()) is None
    assert OutputParsers(name, auto_tools=False, checkpoint=marks).constraint([strict], ToolChoice()) is None
    if name == "olmo3":  # a list of calls in JSON follows any schema
        required = parsers.constraint([strict], REQUIRED)
        assert required is not None
        assert required.json_schema == tool_call_schema([strict], REQUIRED)
        listed = json.dumps([{"name": "f", "parameters": {"a": 1}}])
        assert decoded(parse(parsers, [listed], choice=REQUIRED, tools=[strict])) == [("f", {"a": 1})]


def test_nothing_is_enforced_without_need():
    assert OutputParsers("hermes").constraint(TOOLS, ToolChoice()) is None
    assert OutputParsers("hermes").constraint(TOOLS, ToolChoice(mode="none")) is None
    assert OutputParsers("hermes").constraint([], REQUIRED) is None


def test_references_to_any_place_hold_in_a_list_of_calls():
    """To the whole schema of the arguments, to a part of it, and to a name with percent-encoding."""
    tree = {
        "type": "object",
        "properties": {
            "v": {"type": "integer"},
            "w": {"$ref": "#/properties/v"},
            "x": {"$ref": "#/$defs/a%20b"},
            "left": {"$ref": "#"},
        },
        "required": ["v"],
        "additionalProperties": False,
        "$defs": {"a b": {"type": "null"}},
    }
    text = {"type": "object", "properties": {"v": {"type": "string"}}, "additionalProperties": False}
    schema = call_list_schema({"grow": tree, "say": text})
    validator = jsonschema.Draft202012Validator(schema)
    for parameters, fits in (
        ({"v": 1, "left": {"v": 2, "w": 3, "x": None, "left": {"v": 1}}}, True),
        ({"v": 1, "left": {"v": "2"}}, False),
        ({"v": 1, "left": {"left": {"v": 1}}}, False),
        ({"v": 1, "w": "x"}, False),
        ({"v": 1, "x": 1}, False),
    ):
        assert validator.is_valid([{"name": "grow", "parameters": parameters}]) is fits, parameters


def test_references_stay_whole_in_a_list_of_calls():
    schema = call_list_schema({tool.name: tool.parameters or {} for tool in TOOLS})
    good = [{"name": "move", "parameters": {"to": {"x": 1}}}]
    jsonschema.validate(good, schema)
    for bad in [], [{"name": "move", "parameters": {"to": {}}}], [{"name": "get_weather", "parameters": {"to": {}}}]:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, schema)
