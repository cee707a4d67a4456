"""Whitespace between the tokens of JSON is bounded: small models would write it for ever."""

import json
import pkgutil
from typing import Any

import pytest

from quire.core.config.structured_outputs import StructuredOutputsOptions
from quire.core.wire.protocol import Vocabulary
from quire.core.wire.structured_outputs import GrammarBackend, StructuredOutputsParams
from quire.executor.sampling.grammar.library import LOADERS
from quire.frontend.grammar.backends.backend import GrammarError
from quire.frontend.grammar.constraint import read_constraint
from quire.frontend.grammar.helper_process import BACKENDS

END = 256
BYTES = Vocabulary([*(bytes([byte]) for byte in range(256)), b""], [END])
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": "integer"},
        "b": {
            "type": "object",
            "properties": {"c": {"type": "string"}},
            "required": ["c"],
            "additionalProperties": False,
        },
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}
VALUE = {"a": 1, "b": {"c": "x"}}
PRETTY = [json.dumps(VALUE, indent=indent) for indent in (2, 4)]
SPACED, COMPACT = json.dumps(VALUE), json.dumps(VALUE, separators=(",", ":"))
NEWLINES, SPACES = SPACED.replace('"b"', "\n" * 13 + '"b"'), SPACED.replace('"b"', "\n" + " " * 40 + '"b"')
TAG = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": SCHEMA}}


def accepts(text: str, backend: GrammarBackend, options: StructuredOutputsOptions, **constraint: Any) -> bool:
    constraint = constraint or {"json": SCHEMA}
    read = read_constraint(StructuredOutputsParams(backend=backend, **constraint), options)
    loader = pkgutil.resolve_name(LOADERS[backend])(BYTES)
    matcher = loader.matcher(loader.load(pkgutil.resolve_name(BACKENDS[backend])(BYTES).compile(read)))
    return all(matcher.accept(token_id) for token_id in [*text.encode(), END])


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_library_bounds_whitespace(backend: Any) -> None:
    bounded, free = StructuredOutputsOptions(), StructuredOutputsOptions(max_whitespace=None)
    for text in (SPACED, COMPACT, *PRETTY):
        assert accepts(text, backend, bounded), text
    for text in (NEWLINES, SPACES):
        assert not accepts(text, backend, bounded), text
        assert accepts(text, backend, free), text


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_line_is_one_line_or_refused(backend: Any) -> None:
    line = StructuredOutputsOptions(disable_any_whitespace=True)
    if backend == "lm-format-enforcer":
        with pytest.raises(GrammarError, match="disable_any_whitespace is not supported"):
            accepts(SPACED, backend, line)
    else:
        assert accepts(SPACED, backend, line)
        assert [text for text in (*PRETTY, NEWLINES, SPACES) if accepts(text, backend, line)] == []


@pytest.mark.parametrize("backend", ["xgrammar", "guidance"])
@pytest.mark.parametrize("constraint", [{"structural_tag": TAG}, {"json_object": True}])
def test_other_constraints_with_json_are_bounded_too(backend: Any, constraint: dict[str, Any]) -> None:
    options = StructuredOutputsOptions(max_whitespace=3)
    for text in (SPACED, COMPACT):
        assert accepts(text, backend, options, **constraint), text
    for text in (NEWLINES, SPACES, PRETTY[1]):
        assert not accepts(text, backend, options, **constraint), text


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_pattern_for_whitespace_is_followed_or_refused(backend: Any) -> None:
    asked = {"json": SCHEMA, "whitespace_pattern": r"(\n\n)?"}
    if backend in ("xgrammar", "lm-format-enforcer"):
        with pytest.raises(GrammarError, match="whitespace_pattern is not supported"):
            accepts(COMPACT, backend, StructuredOutputsOptions(), **asked)
    else:
        options = StructuredOutputsOptions()
        assert accepts(SPACED.replace('"b"', '\n\n"b"').replace(" ", ""), backend, options, **asked)
        assert not accepts(SPACED, backend, options, **asked)


def test_names_keep_their_letters_where_rules_are_written_anew() -> None:
    """XGrammar prints ß as `\\xdf`, and would read the e after it as a third digit."""
    schema = {"type": "object", "properties": {"größe": {"const": 1}}, "required": ["größe"]}
    tag = json.dumps({"format": {"type": "json_schema", "json_schema": {**schema, "additionalProperties": False}}})
    line = StructuredOutputsOptions(disable_any_whitespace=True)
    assert accepts('{"größe": 1}', "xgrammar", line, structural_tag=tag)
    assert not accepts('{"grö\u0dfe": 1}', "xgrammar", line, structural_tag=tag)
