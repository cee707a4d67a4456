"""llguidance: a grammar stays text, which each worker's matcher reads in less than a millisecond."""

import json
import re
from typing import Any

import llguidance

from quire.core.protocol import Vocabulary
from quire.frontend.grammar.backends.backend import GrammarError
from quire.frontend.grammar.backends.guidance_tags import TagWriter
from quire.frontend.grammar.constraint import Constraint
from quire.frontend.grammar.schema import normalize, walk
from quire.frontend.grammar.structural_tag import read_format

_FORMATS = {
    *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"),
}
"""Those that llguidance holds strings to; others say something to a reader and nothing to a validator."""


class GuidanceBackend:
    """See `Backend`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        del vocabulary  # whether a grammar is right does not depend on it

    def compile(self, constraint: Constraint) -> bytes:
        grammar = self._grammar(constraint)
        error = llguidance.LLMatcher.validate_grammar(grammar)
        if error and not error.startswith("WARNING"):
            raise GrammarError(_reason(error))
        return grammar.encode()

    def _grammar(self, constraint: Constraint) -> str:
        matcher, text = llguidance.LLMatcher, constraint.text
        match constraint.kind:
            case "json":
                schema = normalize(json.loads(text), closed=constraint.closed)
                return matcher.grammar_from_json_schema(_without_remarks(schema), overrides=_options(constraint))
            case "json_object":
                return matcher.grammar_from_json_schema({"type": "object"}, overrides=_options(constraint))
            case "regex":
                return matcher.grammar_from_regex(text)
            case "choice":
                return matcher.grammar_from_lark("start: " + " | ".join(map(_literal, json.loads(text))))
            case "grammar":
                return matcher.grammar_from_lark(_in_larks_notation(text))
            case "structural_tag":
                return TagWriter(lambda schema: _inline(schema, constraint), _in_larks_notation).write(
                    read_format(json.loads(text))
                )


def _reason(error: str) -> str:
    """The library's own words, without the lines of a grammar that we wrote around the client's."""
    text = re.split(r"\n\s*\d+ \|", error)[0]
    return re.sub(r"^at \d+\(\d+\): ", "", " ".join(text.split()))[:300].rstrip(".")


def _in_larks_notation(text: str) -> str:
    if "::=" not in text:
        return text
    from llguidance.gbnf_to_lark import gbnf_to_lark  # rarely needed

    try:
        return gbnf_to_lark(text)
    except Exception as error:  # whatever a converter of foreign text raises
        raise GrammarError(f"the grammar cannot be read: {error}") from None


def _inline(schema: Any, constraint: Constraint) -> dict[str, Any]:
    """A schema that brings its options along."""
    schema = _without_remarks(normalize(schema, closed=constraint.closed))
    if schema is False:
        raise GrammarError("the schema false allows no output at all")
    return {**({} if schema is True else schema), "x-guidance": _options(constraint)}


def _options(constraint: Constraint) -> Any:
    options: dict[str, Any] = {"whitespace_flexible": constraint.any_whitespace}
    if constraint.whitespace_pattern is not None:
        options["whitespace_pattern"] = constraint.whitespace_pattern
    elif not constraint.any_whitespace:
        options |= {"item_separator": ", ", "key_separator": ": "}
    return options


def _without_remarks(schema: Any) -> Any:
    """Drops formats without a definition here; unknown formats hold nobody to anything (JSON Schema, section 7)."""
    for node in walk(schema):
        if isinstance(node, dict) and "format" in node and node["format"] not in _FORMATS:
            del node["format"]
    return schema


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
