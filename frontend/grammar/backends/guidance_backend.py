"""llguidance: a grammar stays text, which each worker's matcher reads in less than a millisecond."""

import json
from typing import Any

import llguidance

from quire.core.protocol import Vocabulary
from quire.frontend.grammar.backends.backend import GrammarError
from quire.frontend.grammar.constraint import Constraint
from quire.frontend.grammar.schema import normalize, walk

_FORMATS = {
    *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"),
}
"""Those that llguidance holds strings to; others say something to a reader and nothing to a validator."""

_LARK_SPECIAL = '"\\'


class GuidanceBackend:
    """See `Backend`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        del vocabulary  # whether a grammar is right does not depend on it

    def compile(self, constraint: Constraint) -> bytes:
        grammar = self._grammar(constraint)
        error = llguidance.LLMatcher.validate_grammar(grammar)
        if error and not error.startswith("WARNING"):
            raise GrammarError(" ".join(error.split())[:300])
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
                return self._from_notation(text)
            case "structural_tag":
                return _structural_tag(json.loads(text))

    def _from_notation(self, text: str) -> str:
        if "::=" not in text:
            return llguidance.LLMatcher.grammar_from_lark(text)
        from llguidance.gbnf_to_lark import gbnf_to_lark  # rarely needed

        try:
            return llguidance.LLMatcher.grammar_from_lark(gbnf_to_lark(text))
        except Exception as error:  # whatever a converter of foreign text raises
            raise GrammarError(f"the grammar cannot be read: {error}") from None


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


def _structural_tag(tag: dict[str, Any]) -> str:
    """The older form alone: begin, schema and end of each structure, and the triggers that start one."""
    if "structures" not in tag:
        raise GrammarError("structural_tag formats are XGrammar's own; only structures and triggers are supported")
    tags = [
        llguidance.StructTag(
            trigger=next(trigger for trigger in tag["triggers"] if item["begin"].startswith(trigger)),
            begin=item["begin"],
            grammar=item.get("schema", {}),
            end=item["end"],
        )
        for item in tag["structures"]
    ]
    return llguidance.StructTag.to_grammar(tags, assume_special=False)
