"""llguidance: a compiled grammar is text, which each worker's matcher reads in less than a millisecond."""

import json
import re
from typing import Any

import llguidance

from quire.core.wire.protocol import Vocabulary
from quire.frontend.grammar.backends.backend import GrammarError
from quire.frontend.grammar.backends.guidance_tags import TagWriter
from quire.frontend.grammar.backends.guidance_trial import Trial
from quire.frontend.grammar.backends.lark import as_lark, inline_json, inline_regex, inline_text
from quire.frontend.grammar.constraint import Constraint
from quire.frontend.grammar.normalized import normalize
from quire.frontend.grammar.pattern_notations import guidance_regex, rewrite_patterns
from quire.frontend.grammar.schema import LARK, walk
from quire.frontend.grammar.structural_tag import read_format

_FORMATS = {
    *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"),
}
"""Formats that llguidance enforces. Other formats are annotations."""


class GuidanceBackend:
    """Checks constraints with llguidance, and passes them on as its text."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        del vocabulary  # a grammar's validity does not depend on it
        self._trial = Trial()

    def compile(self, constraint: Constraint) -> bytes:
        grammar = self._grammar(constraint)
        error = llguidance.LLMatcher.validate_grammar(grammar)
        if error and not error.startswith("WARNING"):
            raise GrammarError(_reason(error))
        self._trial.run(grammar)
        return grammar.encode()

    def _grammar(self, constraint: Constraint) -> str:
        text = constraint.text
        match constraint.kind:
            case "json" | "json_object":
                schema = _with_options(json.loads(text) if text else {"type": "object"}, constraint)
                lark = f"start: {inline_json(schema)}"
            case "regex":
                lark = f"start: {inline_regex(text)}"
            case "choice":
                lark = "start: " + " | ".join(map(inline_text, json.loads(text)))
            case "grammar":
                lark = _in_larks_notation(text)
            case "structural_tag":
                writer = TagWriter(lambda schema: _with_options(schema, constraint), _in_larks_notation)
                return writer.write(read_format(json.loads(text)))
        return llguidance.LLMatcher.grammar_from_lark(as_lark(lark))


def _reason(error: str) -> str:
    """The library's message, without the lines of the grammar that Quire wrote around the client's."""
    text = re.split(r"\n\s*\d+ \|", error)[0]
    return re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", " ".join(text.split()))[:300].rstrip(".")


def _in_larks_notation(text: str) -> str:
    if "::=" not in text:
        return text
    from llguidance.gbnf_to_lark import gbnf_to_lark  # rarely needed

    try:
        return gbnf_to_lark(text)
    except Exception as error:  # the converter may raise anything on a client's text
        raise GrammarError(f"the grammar cannot be read: {error}") from None


def _with_options(schema: Any, constraint: Constraint) -> dict[str, Any]:
    """A schema for llguidance, with the constraint's options in `x-guidance`."""
    schema = _without_remarks(normalize(schema, closed=constraint.closed))
    rewrite_patterns(schema, guidance_regex)
    if any(isinstance(node, dict) and LARK in node for node in walk(schema)):
        raise GrammarError(f"{LARK} is not supported")
    if schema is False:
        raise GrammarError("the schema false allows no output at all")
    return {**({} if schema is True else schema), "x-guidance": _options(constraint)}


def _options(constraint: Constraint) -> Any:
    options: dict[str, Any] = {"whitespace_flexible": constraint.any_whitespace}
    if constraint.whitespace_pattern is not None:
        options["whitespace_pattern"] = constraint.whitespace_pattern
    elif not constraint.any_whitespace:
        options |= {"item_separator": ", ", "key_separator": ": "}
    elif constraint.max_whitespace is not None:
        options["whitespace_pattern"] = rf"[ \n\r\t]{{1,{constraint.max_whitespace}}}"
    return options


def _without_remarks(schema: Any) -> Any:
    """Drops formats that llguidance does not enforce: an unknown format is an annotation (JSON Schema, section 7)."""
    for node in walk(schema):
        if isinstance(node, dict) and "format" in node and node["format"] not in _FORMATS:
            del node["format"]
    return schema
