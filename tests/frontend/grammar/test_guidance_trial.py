"""Grammars that llguidance takes, and that cannot go on after some text, are refused when they are compiled."""

from typing import Any

import llguidance
import pytest

from quire.frontend.grammar.backends.backend import GrammarError
from quire.frontend.grammar.backends.guidance_trial import Trial
from quire.frontend.grammar.backends.lark import as_lark, inline_json
from tests.frontend.grammar.libraries import Grammar
from tests.schemas import API_SCHEMAS

KNOWN = {"a": {"type": "integer"}}


def grammar(schema: Any) -> str:
    return llguidance.LLMatcher.grammar_from_lark(as_lark(f"start: {inline_json(schema)}"))


@pytest.mark.parametrize("names", [["a"], []])
@pytest.mark.parametrize("options", [{}, {"x-guidance": {"whitespace_pattern": "[ \\n]{1,20}"}}])
def test_a_trap_is_found(names: list[str], options: dict[str, Any]) -> None:
    """After the comma, only names would fit that the object has already."""
    schema = {"type": "object", "properties": KNOWN, "patternProperties": {"^a$": {}}, "additionalProperties": False}
    assert llguidance.LLMatcher.validate_grammar(grammar(schema)) == ""
    with pytest.raises(GrammarError, match=r"nothing can follow .*,'"):
        Trial().run(grammar({**schema, "required": names, **options}))


@pytest.mark.parametrize("schema", [*API_SCHEMAS.values(), {"type": "string", "pattern": "^ {90}$"}, {}])
def test_grammars_that_go_on_are_kept(schema: Any) -> None:
    Trial().run(grammar(schema))


def test_the_library_is_tried_when_it_compiles() -> None:
    with pytest.raises(GrammarError, match="nothing can follow 'a'"):
        Grammar("guidance", grammar='start: "a" B\nB: /b/ & /c/')
