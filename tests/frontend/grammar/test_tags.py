"""Structural tags: both libraries enforce the same formats, and neither silently ignores a keyword."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from quire.core.wire.protocol import Vocabulary
from quire.core.wire.structured_outputs import StructuredOutputsParams
from quire.executor.sampling.grammar.guidance_matcher import GuidanceLoader
from quire.executor.sampling.grammar.matcher import Matcher
from quire.executor.sampling.grammar.xgrammar_matcher import XGrammarLoader
from quire.frontend.grammar.backends.guidance_backend import GuidanceBackend
from quire.frontend.grammar.backends.xgrammar_backend import XGrammarBackend
from quire.frontend.grammar.constraint import Constraint
from quire.frontend.grammar.helper_process import Compiler
from quire.frontend.grammar.messages import Answer, Compile, Compiled, GrammarRefused, Setup
from quire.frontend.grammar.non_strict_schemas import loosened
from quire.frontend.parsing.answers.constraints import after_reasoning
from quire.frontend.parsing.answers.parsers import CallConstraint, OutputParsers, ReasoningMarks
from quire.frontend.parsing.tools import Tool, ToolChoice
from tests.checkpoints import EOS_TOKEN_ID
from tests.schemas import API_SCHEMAS

END = 256
VOCABULARY = Vocabulary(
    [
        *(bytes([byte]) for byte in range(256)),
        b"",
        b"<think>",
        b"</think>",
        b'k>{"',
        b'": "',
        b'"}</',
        b"</f><f>",
        b"aa",
    ],
    [END],
)
BACKENDS = {
    "xgrammar": (XGrammarBackend(VOCABULARY), XGrammarLoader(VOCABULARY)),
    "guidance": (GuidanceBackend(VOCABULARY), GuidanceLoader(VOCABULARY)),
}
AUTO = ("xgrammar", "guidance")
CITY = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "integer"}}, "required": ["a"]}
SCHEMA = {"type": "json_schema", "json_schema": CITY}
PATTERN_AND_LENGTH = {"type": "string", "pattern": "^a+$", "maxLength": 4}


def tag(content: dict[str, Any], begin: str = "<f>", end: Any = "</f>") -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def matcher(backend: str, form: dict[str, Any], **options: Any) -> Matcher:
    library, loader = BACKENDS[backend]
    text = json.dumps({"type": "structural_tag", "format": form})
    data = library.compile(Constraint("structural_tag", text, AUTO, closed=True, **options))
    return loader.matcher(loader.load(data))


def follows(started: Matcher, text: str) -> bool:
    return all(started.accept(byte) for byte in text.encode()) and started.accept(END)


ANY_TEXT = {"type": "any_text"}
DIGITS = {"type": "regex", "pattern": "[0-9]{1,3}"}
FORMATS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "a schema in a tag": (
        tag(SCHEMA, end=["</f>", "</g>"]),
        ['<f>{"a": "x"}</f>', '<f>{"a":"y","b":-3}</g>', '<f>{\n "a": "x"\n}</f>'],
        ["", '<f>{"a":"x"}', '<f>{"a":"z"}</f>', '<f>{"a":"x","c":1}</f>', '{"a":"x"}'],
    ),
    "free text in a tag": (tag(ANY_TEXT), ["<f></f>", "<f></g> <f>é\n</f>"], ["<f>a", "<f>a</f></f>", "a"]),
    "text without some words": (
        tag({"type": "any_text", "excludes": ["no", "/"]}),
        ["<f>n</f>", "<f>n o</f>"],
        ["<f>no</f>", "<f>a/b</f>"],
    ),
    "what is regular in a row": (
        {"type": "sequence", "elements": [DIGITS, {"type": "const_string", "value": "5:"}, DIGITS, SCHEMA]},
        ['15:7{"a":"x"}', '555:777{"a":"x"}'],
        ['5:7{"a":"x"}', '55555:7{"a":"x"}', '15:{"a":"x"}'],
    ),
    "letters before an end that has letters": (
        tag({"type": "regex", "pattern": "[a-z/]+|\\n"}, end="end"),
        ["<f>aend", "<f>endend", "<f>a/bend", "<f>\nend"],
        ["<f>end", "<f>a", "<f>a\nend"],
    ),
    "tags with a separator": (
        {"type": "tags_with_separator", "tags": [tag(ANY_TEXT), tag(SCHEMA, "<g>")], "separator": ", "},
        ["", "<f>a</f>", '<f>a</f>, <g>{"a":"x"}</f>, <f></f>'],
        ["<f>a</f>, ", "<f>a</f><f>a</f>", "a"],
    ),
    "one tag of several": (
        {
            "type": "tags_with_separator",
            "tags": [tag(ANY_TEXT), tag(SCHEMA, "<g>")],
            "separator": "",
            "at_least_one": True,
            "stop_after_first": True,
        },
        ["<f>a</f>", '<g>{"a":"x"}</f>'],
        ["", "<f>a</f><f>a</f>"],
    ),
    "tags that text triggers": (
        {"type": "triggered_tags", "triggers": ["<f", "<g"], "tags": [tag(ANY_TEXT), tag(SCHEMA, "<g>")]},
        ["", "a < b", "a<f>b</f>", '<g>{"a":"x"}</f>c<f>d</f>e', "<f></f><f></f>"],
        ["<f", "<f=", "<f>a", '<g>{"a":"z"}</f>'],
    ),
    "one tag that text triggers": (
        {"type": "triggered_tags", "triggers": ["<f"], "tags": [tag(SCHEMA)], "stop_after_first": True},
        ["", "a", 'a<f>{"a":"x"}</f>'],
        ["<f", '<f>{"a":"x"}</f>a'],
    ),
    "at least one tag": (
        {"type": "triggered_tags", "triggers": ["<f"], "tags": [tag(SCHEMA)], "at_least_one": True},
        ['<f>{"a":"x"}</f>', '<f>{"a":"x"}</f>b<f>{"a":"y"}</f>'],
        ["", "a", 'a<f>{"a":"x"}</f>'],
    ),
    "repetition": (
        {
            "type": "sequence",
            "elements": [
                {"type": "optional", "content": {"type": "const_string", "value": "a"}},
                {"type": "repeat", "min": 1, "max": 2, "content": tag(SCHEMA)},
                {"type": "star", "content": {"type": "const_string", "value": "b"}},
                {"type": "plus", "content": {"type": "or", "elements": [tag(SCHEMA, "<h>"), DIGITS]}},
            ],
        },
        ['<f>{"a":"x"}</f>7', 'a<f>{"a":"x"}</f><f>{"a":"x"}</f>bb<h>{"a":"x"}</f>8'],
        ["a7", '<f>{"a":"x"}</f>' * 3 + "7", '<f>{"a":"x"}</f>b'],
    ),
    "a grammar": (
        tag({"type": "grammar", "grammar": 'root ::= "(" root ")" | "x"'}),
        ["<f>x</f>", "<f>((x))</f>"],
        ["<f>(x</f>", "<f></f>"],
    ),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FORMATS)
def test_both_libraries_follow_the_same_formats(backend: str, name: str) -> None:
    form, good, bad = FORMATS[name]
    assert [text for text in good if not follows(matcher(backend, form), text)] == []
    assert [text for text in bad if follows(matcher(backend, form), text)] == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_tags_of_before_2026_are_read_by_both(backend: str) -> None:
    library, loader = BACKENDS[backend]
    text = json.dumps({"structures": [{"begin": "<f>", "schema": CITY, "end": "</f>"}], "triggers": ["<f"]})
    made = loader.load(library.compile(Constraint("structural_tag", text, AUTO)))
    assert follows(loader.matcher(made), 'a<f>{"a":"x"}</f>b')
    assert not follows(loader.matcher(made), 'a<f>{"a":"z"}</f>')


@pytest.mark.parametrize("backend", BACKENDS)
def test_json_within_a_format_may_be_held_to_one_line(backend: str) -> None:
    for text, is_free, is_held in [
        ('<f>{"a": "x", "b": 1}</f>', True, True),
        ('<f>{"a":  "x"}</f>', True, False),
        ('<f>{"a": "x"\n}</f>', True, False),
    ]:
        assert follows(matcher(backend, tag(SCHEMA)), text) is is_free
        assert follows(matcher(backend, tag(SCHEMA), any_whitespace=False), text) is is_held


def test_tokens_over_the_border_of_two_parts_are_allowed() -> None:
    """Every output that the masks allow matches the tag, even if one token ends a part and begins the next."""
    hard = {"type": "object", "properties": {"a": PATTERN_AND_LENGTH}, "required": ["a"]}
    for begin in ("<think>", None):
        asked = after_reasoning(StructuredOutputsParams(json=hard), ReasoningMarks(begin, "</think>"))
        assert isinstance(asked.structural_tag, dict)
        for seed in range(12):
            text = wander(matcher("guidance", asked.structural_tag["format"]), random.Random(seed))
            answer = text.split("</think>", 1)[-1]
            assert ("</think>" in text) == text.startswith("<think>") or begin is None
            jsonschema.validate(json.loads(answer), hard)
    started = matcher("guidance", asked.structural_tag["format"])
    for token in (b"a", b"<", b"/", b"t", b"h", b"i", b"n", b'k>{"', b"a", b'": "', b"aa", b'"', b"}"):
        assert started.accept(VOCABULARY.tokens.index(token)), token
    assert started.accept(END)


def wander(started: Matcher, dice: random.Random) -> str:
    """A random text of a grammar. Free text is cut short."""
    out = b""
    while True:
        bitmask = np.zeros((1, -(-len(VOCABULARY.tokens) // 32)), np.int32)
        started.fill(bitmask, 0)
        allowed = np.flatnonzero(np.unpackbits(bitmask.view(np.uint8), bitorder="little")).tolist()
        if END in allowed:
            return out.decode()
        printable = [
            i for i in allowed if VOCABULARY.tokens[i].decode("latin-1").isprintable() and i not in range(128, 256)
        ]
        token_id = dice.choice(printable or allowed)
        if len(printable) > 60:  # within reasoning
            token_id = VOCABULARY.tokens.index(b"</think>") if len(out) > 20 else token_id
        assert started.accept(token_id)
        out += VOCABULARY.tokens[token_id]


# ------------------------------------------------------------------------------------------------------------ keywords

ONLY_GUIDANCE = {
    "pattern and maxLength": (PATTERN_AND_LENGTH, "maxLength beside pattern"),
    "format and minLength": ({"type": "string", "format": "uuid", "minLength": 4}, "minLength beside format"),
    "multipleOf of numbers": ({"type": "number", "multipleOf": 0.5}, "multipleOf"),
    "two parts": ({"type": "string", "allOf": [{"pattern": "^a"}, {"pattern": "b$"}]}, "allOf"),
    "alternatives beside a type": ({"type": "integer", "anyOf": [{"minimum": 5}, {"maximum": 1}]}, "anyOf"),
    "a name that is not described": ({"type": "object", "required": ["a"]}, "required"),
    "flags in a pattern": ({"type": "string", "pattern": "^(?i)ab$"}, "pattern"),
    "a limit without a type": ({"minimum": 3}, "minimum"),
    "pattern without a type": ({"pattern": "^a$"}, "pattern"),
    "pattern and format": ({"type": "string", "pattern": "^a", "format": "uuid"}, "pattern beside format"),
    "enum and const": ({"enum": ["a", "b"], "const": "a"}, "enum"),
    "names and patterns of names": (
        {"type": "object", "properties": {"a": {}}, "patternProperties": {"^x": {"type": "null"}}},
        "patternProperties",
    ),
    "the days of months": ({"type": "string", "format": "date"}, None),
    "any characters but": ({"type": "string", "pattern": "^[^a]{1,3}$"}, None),
    "names with escapes": (
        {"type": "object", "patternProperties": {"^a\\n": {"type": "null"}}, "additionalProperties": False},
        "patternProperties",
    ),
}
NOBODY = {
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "contains": {"type": "array", "contains": {"type": "integer"}},
    "not": {"not": {"type": "string"}},
    "if": {"if": {"type": "string"}, "then": {"minLength": 2}},
    "oneOf": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "propertyNames": {"type": "object", "propertyNames": {"format": "date"}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}},
    "contains nothing": {"type": "array", "contains": False},
    "$dynamicRef": {"$dynamicRef": "#a"},
}
"""Keywords that stand for nothing unless somebody follows them."""


def defs(schema: dict[str, Any]) -> dict[str, Any]:
    """References begin at the root, so definitions stay at the root."""
    return {"$defs": schema["$defs"]} if "$defs" in schema else {}


PLACES: dict[str, Callable[[Any], tuple[str, Any]]] = {
    "alone": lambda schema: ("json", schema),
    "in a list": lambda schema: ("json", {"type": "array", "items": {**schema, "$defs": {}}, **defs(schema)}),
    "in a tag": lambda schema: ("structural_tag", {"format": tag({"type": "json_schema", "json_schema": schema})}),
    "after reasoning": lambda schema: (
        "structural_tag",
        after_reasoning(StructuredOutputsParams(json=schema), ReasoningMarks("<think>", "</think>")).structural_tag,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def compiler(checkpoint: Callable[..., Path]) -> Compiler:
    """The helper process's compiler, in this process."""
    return Compiler(Setup(str(checkpoint("llama")), 320, [EOS_TOKEN_ID], 2**30, 60))


@pytest.fixture(scope="module")
def compile_in(compiler: Compiler) -> Callable[..., Answer]:
    """`compile_in(place, schema, backends)`."""

    def answer(place: str, schema: Any, backends: tuple[str, ...] = AUTO) -> Answer:
        kind, value = PLACES[place](schema)
        return compiler.answer(Compile(Constraint(kind, json.dumps(value), backends, closed=True), ["all", "text"]))

    return answer


@pytest.fixture(scope="module")
def compile_tag(compiler: Compiler) -> Callable[[CallConstraint], Answer]:
    """Compiles the structural tag for the calls that a request asks for."""

    def answer(asked: CallConstraint) -> Answer:
        constraint = Constraint("json", json.dumps(asked.json_schema), AUTO, closed=True)
        if asked.structural_tag is not None:
            constraint = Constraint("structural_tag", json.dumps(asked.structural_tag), AUTO, closed=True)
        return compiler.answer(Compile(constraint, ["all", "text"]))

    return answer


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ONLY_GUIDANCE)
def test_what_one_library_cannot_do_another_takes(compile_in: Callable[..., Answer], place: str, name: str) -> None:
    schema, words = ONLY_GUIDANCE[name]
    answer = compile_in(place, schema)
    assert isinstance(answer, Compiled), answer
    assert answer.backend == "guidance"
    alone = compile_in(place, schema, ("xgrammar",))
    assert isinstance(alone, Compiled if words is None else GrammarRefused)
    assert words is None or f"xgrammar: {words} " in alone.message


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("keyword", NOBODY)
def test_what_no_library_can_do_is_refused_wherever_it_stands(
    compile_in: Callable[..., Answer], place: str, keyword: str
) -> None:
    for backends in (AUTO, *((each,) for each in AUTO)):
        answer = compile_in(place, NOBODY[keyword], backends)
        assert isinstance(answer, GrammarRefused), (backends, answer)
        assert keyword.split()[0] in answer.message


@pytest.mark.parametrize("schema", API_SCHEMAS.values(), ids=API_SCHEMAS)
def test_schemas_of_real_apis_are_followed_after_reasoning(compile_in: Callable[..., Answer], schema: Any) -> None:
    assert isinstance(compile_in("after reasoning", schema), Compiled)


@pytest.mark.parametrize(
    ("form", "word"),
    [
        (tag({"type": "token", "token": 3}), "token"),
        (tag({**SCHEMA, "style": "qwen_xml"}), "style"),
        (tag({**SCHEMA, "any_order": True}), "any_order"),
        (tag({"type": "any_text", "max_tokens": 3}), "max_tokens"),
        (tag(SCHEMA, begin={"type": "token", "token": 3}), "tokens"),  # type: ignore[arg-type]
        (tag({"type": "regex", "pattern": "a\\"}), "backslash"),
        (tag({"type": "json_schema", "json_schema": False}), "false"),
    ],
)
def test_formats_of_one_library_alone_are_refused_by_name(form: dict[str, Any], word: str) -> None:
    with pytest.raises(Exception, match=word):
        matcher("guidance", form)


# ------------------------------------------------------------------------------------------------------------ loosened

LOOSE = {
    "unique": ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, [[1, 2], []], ["x", ["x"]]),
    "pattern": (PATTERN_AND_LENGTH, ["aa"], ["b", 1]),
    "enum": ({"type": "string", "enum": ["a", 1], "minLength": 1}, ["a"], ["b"]),
    "one of": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, [1.5], ["a"]),
    "names": (
        {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a", "b"]},
        [{"a": None, "b": 1}],
        [{"b": 1}],
    ),
    "names by pattern": (
        {"type": "object", "patternProperties": {"^\\bx": {}}, "additionalProperties": False},
        [{"x": 1}],
        [1],
    ),
    "condition": ({"type": "integer", "if": {"minimum": 3}, "then": {"maximum": 9}}, [4, 1], ["a"]),
    "deep": ({"type": "array", "items": {"not": {"type": "null"}, "type": "boolean"}}, [[True]], [[1]]),
}


@pytest.mark.parametrize("name", LOOSE)
def test_a_loosened_schema_holds_to_what_it_can(compile_in: Callable[..., Answer], name: str) -> None:
    schema, good, bad = LOOSE[name]
    loose = loosened(schema)
    for value in good:
        jsonschema.validate(value, schema)
        jsonschema.validate(value, loose)
    for value in bad:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(value, loose)
    assert isinstance(compile_in("in a tag", loose, ("xgrammar",)), Compiled)


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", None])
@pytest.mark.parametrize("mode", ["required", "named"])
def test_only_strict_functions_are_refused_for_their_schemas(
    compile_tag: Callable[..., Answer], name: str | None, mode: Any
) -> None:
    schema = {**CITY, "properties": {"p": {"type": "array", "uniqueItems": True}}, "required": ["p"]}
    answers = []
    for is_strict in (False, True):
        tool = Tool(name="f", parameters=schema, strict=is_strict)
        asked = OutputParsers(name).constraint([tool], ToolChoice(mode=mode, name="f" if mode == "named" else None))
        assert asked is not None
        answers.append(compile_tag(asked))
    assert isinstance(answers[0], Compiled)
    assert isinstance(answers[1], GrammarRefused)
    assert "uniqueItems" in answers[1].message


def test_schemas_that_any_library_follows_stay_as_they_are() -> None:
    assert loosened(CITY) == CITY
    for wrong in ({"allOf": 3}, {"$ref": 5}, {"required": 7, "properties": {}}, {"type": "object", "required": [[]]}):
        assert loosened(wrong) == wrong
