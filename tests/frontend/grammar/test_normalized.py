"""Schemas rewritten for libraries: they hold for the same values, and objects with parts are closed as a whole."""

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from quire.core.wire.structured_outputs import GrammarBackend
from quire.frontend.grammar.backends.backend import GrammarError
from quire.frontend.grammar.normalized import normalize
from quire.frontend.grammar.schema import SchemaError
from tests.frontend.grammar.libraries import Grammar

BASE = {"type": "object", "properties": {"id": {"type": "integer"}, "tag": {"type": "string"}}, "required": ["id"]}
NAME = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
DEFS = {"$defs": {"Base": BASE, "Name": NAME}}
PET = [{"id": 1, "name": "a"}, {"id": 1, "tag": "t", "name": "a"}, {"id": 1}, {"name": "a"}, {"id": "x", "name": "a"}]

Case = tuple[dict[str, Any], list[Any]]

PARTS: dict[str, Case] = {
    "a reference in allOf": ({"allOf": [{"$ref": "#/$defs/Base"}, NAME], **DEFS}, PET),
    "two references": ({"allOf": [{"$ref": "#/$defs/Base"}, {"$ref": "#/$defs/Name"}], **DEFS}, PET),
    "a reference beside properties": ({"$ref": "#/$defs/Base", **NAME, **DEFS}, PET),
    "inheritance, as OpenAPI writes it": (
        {"$ref": "#/$defs/Dog", "$defs": {**DEFS["$defs"], "Dog": {"allOf": [{"$ref": "#/$defs/Base"}, NAME]}}},
        PET,
    ),
    "heirs told apart by a constant": (
        {
            "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
            "$defs": {
                "Pet": {"type": "object", "properties": {"kind": {"type": "string"}}, "required": ["kind"]},
                "Cat": {"allOf": [{"$ref": "#/$defs/Pet"}, {"properties": {"kind": {"const": "cat"}}}]},
                "Dog": {
                    "allOf": [
                        {"$ref": "#/$defs/Pet"},
                        {"properties": {"kind": {"const": "dog"}, "b": {"type": "null"}}},
                    ]
                },
            },
        },
        [{"kind": "cat"}, {"kind": "dog"}, {"kind": "dog", "b": None}, {"kind": "x"}, {"b": None}],
    ),
    "a base that is used alone, too": (
        {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/Base"}, "b": {"allOf": [{"$ref": "#/$defs/Base"}, NAME]}},
            "required": ["a", "b"],
            **DEFS,
        },
        [{"a": {"id": 1}, "b": {"id": 1, "name": "a"}}, {"a": {"id": 1}, "b": {"id": 1}}, {"a": {}, "b": PET[0]}],
    ),
    "parts in parts": (
        {
            "allOf": [
                {"allOf": [{"$ref": "#/$defs/Base"}, {"required": ["tag"]}]},
                {"properties": {"id": {"minimum": 5}}},
            ],
            **DEFS,
        },
        [{"id": 5, "tag": "t"}, {"id": 4, "tag": "t"}, {"id": 5}],
    ),
    "one reference with a description": (
        {"type": "object", "properties": {"p": {"allOf": [{"$ref": "#/$defs/Base"}], "description": "d"}}, **DEFS},
        [{"p": {"id": 1}}, {"p": {}}, {}],
    ),
    "a tree": (
        {
            "$ref": "#/$defs/Node",
            "$defs": {
                "Base": BASE,
                "Node": {
                    "allOf": [
                        {"$ref": "#/$defs/Base"},
                        {"properties": {"c": {"type": "array", "items": {"$ref": "#/$defs/Node"}}}},
                    ]
                },
            },
        },
        [{"id": 1}, {"id": 1, "c": [{"id": 2, "c": []}]}, {"id": 1, "c": [{"c": []}]}],
    ),
    "a part of itself": (
        {
            "$ref": "#/$defs/N",
            "$defs": {
                "N": {
                    "type": "object",
                    "properties": {"n": {"$ref": "#/$defs/N", "properties": {"m": {"type": "null"}}}},
                }
            },
        },
        [{}, {"n": {"n": {"m": None}, "m": None}}, {"n": {"m": 1}}],
    ),
    "unevaluatedProperties beside allOf": (
        {"allOf": [{"$ref": "#/$defs/Base"}, NAME], "unevaluatedProperties": False, **DEFS},
        [*PET, {"id": 1, "name": "a", "x": 1}],
    ),
    "unevaluatedProperties beside anyOf": (
        {
            "type": "object",
            "properties": {"c": {"type": "null"}},
            "anyOf": [BASE, NAME],
            "unevaluatedProperties": False,
        },
        [*PET, {}, {"c": None}, {"c": None, "name": "a"}, {"id": 1, "x": 1}, {"name": "a", "tag": "t"}],
    ),
    "unevaluatedProperties beside references in anyOf": (
        {"anyOf": [{"$ref": "#/$defs/Base"}, {"$ref": "#/$defs/Name"}], "unevaluatedProperties": False, **DEFS},
        [*PET, {}, {"id": 1, "x": 1}],
    ),
    "unevaluatedProperties beside oneOf": (
        {
            "type": "object",
            "properties": {"c": {"type": "null"}},
            "oneOf": [
                {"properties": {"k": {"const": 1}}, "required": ["k"]},
                {"properties": {"k": {"const": 2}, "b": {"type": "null"}}, "required": ["k"]},
            ],
            "unevaluatedProperties": False,
        },
        [{}, {"k": 1}, {"c": None, "k": 2}, {"k": 2, "b": None}, {"k": 1, "b": None}, {"k": 3}, {"k": 1, "x": 1}],
    ),
    "a closed part": (
        {"allOf": [{**BASE, "additionalProperties": False}, {"properties": {"name": {}}}]},
        [{"id": 1}, {"id": 1, "tag": "t"}, {"id": 1, "name": "a"}],
    ),
    "tuples": (
        {
            "allOf": [
                {"type": "array", "prefixItems": [{"type": "integer"}], "items": {"type": "null"}},
                {"prefixItems": [{}, {}], "minItems": 2},
            ]
        },
        [[1, None], [1], [1, 2], ["a", None]],
    ),
    "constants": (
        {"allOf": [{"enum": ["a", "b", 1, True]}, {"enum": ["b", "c", True, 1.0]}, {"type": ["string", "integer"]}]},
        ["a", "b", "c", 1, True],
    ),
}

IDLE: dict[str, Case] = {
    "records of zod": (
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}},
        [{}, {"a": 1}, {"a": "x"}],
    ),
    "records of enumerated names": (
        {
            "type": "object",
            "propertyNames": {"type": "string", "enum": ["a", "b"]},
            "additionalProperties": {"type": "number"},
        },
        [{}, {"a": 1}, {"a": 1, "b": 2}, {"c": 1}, {"a": "x"}],
    ),
    "records of names with a pattern": (
        {"type": "object", "propertyNames": {"pattern": "^[a-c]+$"}, "additionalProperties": {"type": "number"}},
        [{}, {"ab": 1}, {"x": 1}, {"a": "x"}],
    ),
    "names of a length": (
        {"type": "object", "propertyNames": {"maxLength": 1}, "additionalProperties": {"type": "null"}},
        [{}, {"a": None}, {"ab": None}],
    ),
    "names of any kind": ({"type": "object", "properties": {"a": {}}, "propertyNames": True}, [{"a": 1}]),
    "a branch for nothing": ({"anyOf": [{"type": "string"}, {"not": {}}]}, ["a", 1]),
    "a branch for nothing in oneOf": ({"oneOf": [{"type": "string"}, False]}, ["a", 1]),
    "a branch for anything": ({"type": "string", "anyOf": [{"minLength": 3}, {}]}, ["a", "abc", 1]),
    "false and zero": (
        {
            "type": "array",
            "items": {"type": "integer"},
            "uniqueItems": False,
            "minItems": 0,
            "contains": {},
            "minContains": 0,
        },
        [[], [1, 1], ["a"]],
    ),
    "unique by length": (
        {"type": "array", "items": {"type": "null"}, "maxItems": 1, "uniqueItems": True},
        [[], [None], [None, None]],
    ),
    "words for other types": (
        {"type": "string", "uniqueItems": True, "minimum": 3, "required": ["a"], "contains": {"const": 1}},
        ["a", 1],
    ),
    "a condition without an end": ({"type": "string", "if": {"minLength": 3}}, ["a", 1]),
    "an end without a condition": ({"type": "string", "then": {"minLength": 3}, "else": False}, ["a", 1]),
    "a condition that holds": ({"type": "string", "if": {}, "then": {"minLength": 2}, "else": False}, ["a", "ab"]),
    "a condition that never holds": ({"if": False, "then": False, "else": {"type": "string"}}, ["a", 1]),
    "not of another type": ({"type": "integer", "not": {"type": "string"}}, [1, "a"]),
    "not of nothing": ({"type": "integer", "not": False}, [1, "a"]),
    "dependencies on nothing": (
        {**NAME, "dependentRequired": {"x": [], "name": ["name"]}, "dependentSchemas": {"x": True}, "dependencies": {}},
        [{"name": "a"}, {}],
    ),
    "a dependency that always holds": ({**NAME, "dependencies": {"name": ["name"]}}, [{"name": "a"}, {}]),
    "unevaluatedProperties of anything": (
        {**NAME, "unevaluatedProperties": True},
        [{"name": "a"}, {"name": "a", "x": 1}],
    ),
    "an anchor": (
        {"type": "object", "properties": {"a": {"$ref": "#x"}}, "$defs": {"X": {"$anchor": "x", "type": "null"}}},
        [{"a": None}, {"a": 1}],
    ),
    "values beside limits": ({"type": "integer", "enum": [1, "a", 7, 2.0], "minimum": 2}, [1, 7, 2, "a"]),
    "texts beside a pattern": ({"enum": ["a", "b", "ab"], "pattern": "^a", "maxLength": 1}, ["a", "b", "ab"]),
}

NAMES: dict[str, Case] = {
    "patterns of known names": (
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "patternProperties": {"^a$": {"minimum": 0}},
            "additionalProperties": False,
        },
        [{}, {"a": 1}, {"a": -1}, {"b": 1}],
    ),
    "patterns of few names": (
        {"type": "object", "patternProperties": {"^(a|b)$": {"type": "integer"}}, "additionalProperties": False},
        [{}, {"a": 1}, {"a": 1, "b": 2}, {"a": "x"}, {"c": 1}],
    ),
    "a known name beside its pattern": (
        {
            "type": "object",
            "properties": {"ab": {"type": "integer"}},
            "patternProperties": {"^a": {"maximum": 5}},
            "additionalProperties": False,
        },
        [{"ab": 5}, {"ab": 6}, {"ac": 5}, {"ac": "x"}, {"ac": 6}, {"b": 1}],
    ),
    "a pattern of all names": (
        {
            "type": "object",
            "patternProperties": {".*": {"type": "integer"}},
            "additionalProperties": {"type": "string"},
        },
        [{}, {"a": 1}, {"a": "x"}],
    ),
    "a name in percent-encoding": (
        {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/Foo%20Bar"}, "b": {"$ref": "#/$defs/x~1y%25"}},
            "$defs": {"Foo Bar": {"type": "null"}, "x/y%": BASE},
        },
        [{"a": None}, {"b": {"id": 1}}, {"a": 1}, {"b": {}}],
    ),
    "a place that is no definition": (
        {
            "type": "object",
            "properties": {"a": {"type": "array", "items": {"type": "null"}}, "b": {"$ref": "#/properties/a/items"}},
        },
        [{"a": [None], "b": None}, {"b": 1}],
    ),
}

BOTH: tuple[GrammarBackend, ...] = ("xgrammar", "guidance")


def check(schema: dict[str, Any], values: list[Any], backend: GrammarBackend) -> None:
    validator, grammar = Draft202012Validator(schema), Grammar(backend, json=schema)
    for value in values:
        assert grammar.accepts(json.dumps(value)) == validator.is_valid(value), value


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize("name", PARTS)
def test_parts_are_one_schema(name: str, backend: GrammarBackend) -> None:
    check(*PARTS[name], backend)


@pytest.mark.parametrize("name", IDLE)
def test_a_keyword_that_restricts_nothing_is_no_obstacle(name: str) -> None:
    check(*IDLE[name], "guidance")
    if "names with a pattern" not in name and "names of a length" not in name:
        check(*IDLE[name], "xgrammar")


@pytest.mark.parametrize("name", NAMES)
def test_names_are_found(name: str) -> None:
    check(*NAMES[name], "guidance")


@pytest.mark.parametrize("name", PARTS)
def test_objects_of_parts_are_closed_as_a_whole(name: str) -> None:
    """XGrammar closes objects, and so does the other library if it comes second."""
    written = json.dumps(normalize(PARTS[name][0], closed=True))
    assert written.count('"properties"') == written.count('"additionalProperties": false')


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {}},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"enum": ["a"], "type": "integer"},
        {
            "allOf": [
                {**NAME, "additionalProperties": False},
                {"type": "object", "required": ["x"], "properties": {"x": {}}},
            ]
        },
        {"anyOf": [False, {"enum": []}]},
        {"type": "object", "propertyNames": {"enum": ["b"]}, "properties": {"a": {}}, "required": ["a"]},
    ],
)
def test_a_schema_for_no_value_is_told(schema: dict[str, Any]) -> None:
    with pytest.raises(SchemaError, match="allows no value"):
        normalize(schema, closed=False)


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"oneOf": [BASE, NAME], "unevaluatedProperties": False}, "oneOf|unevaluatedProperties"),
        ({**NAME, "if": BASE, "then": {"required": ["tag"]}, "unevaluatedProperties": False}, "if"),
        ({"type": "object", "anyOf": [BASE] * 5 + [NAME], "unevaluatedProperties": False}, "anyOf|unevaluatedProp"),
    ],
)
def test_unevaluated_properties_that_no_library_follows_are_refused(
    schema: dict[str, Any], word: str, backend: GrammarBackend
) -> None:
    """Branches of which one alone may hold, conditions, and too many branches."""
    with pytest.raises(GrammarError, match=word):
        Grammar(backend, json=schema)


def test_schemas_that_would_grow_for_ever_are_left_as_they_are() -> None:
    doubled = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]} for i in range(30)}
    circle = {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": {"allOf": [{"$ref": "#/$defs/a"}, {"minimum": 1}]}}
    for first, defs in (("d0", {**doubled, "d30": BASE}), ("a", circle)):
        out = normalize({"$ref": f"#/$defs/{first}", "$defs": defs}, closed=True)
        assert len(json.dumps(out)) < 10_000
