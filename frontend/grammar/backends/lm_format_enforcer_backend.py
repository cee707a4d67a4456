"""lm-format-enforcer: nothing is compiled. The constraint is checked here, and each worker reads it again."""

from typing import Any

import msgspec

from quire.core.light_import import without
from quire.core.wire.protocol import Vocabulary
from quire.frontend.grammar.backends.backend import GrammarError
from quire.frontend.grammar.constraint import Constraint
from quire.frontend.grammar.normalized import normalize
from quire.frontend.grammar.pattern_notations import plain_regex, rewrite_patterns
from quire.frontend.grammar.schema import SchemaError, walk
from quire.frontend.grammar.unenforced_keywords import NUMBER_WORDS, keyword_gap

with without("torch"):  # only needed for its bit masks, which are not used
    from lmformatenforcer import CharacterLevelParserConfig, JsonSchemaParser, RegexParser

_MISSING = frozenset(
    {
        *NUMBER_WORDS,
        *("minProperties", "maxProperties", "patternProperties", "prefixItems", "unevaluatedItems", "format"),
    }
)
_ENDLESS = 2**31
_KINDS = ("json", "regex", "choice")


class LMFormatEnforcerBackend:
    """Checks constraints with lm-format-enforcer, and passes them on for the workers to read."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        del vocabulary

    def compile(self, constraint: Constraint) -> bytes:
        if constraint.kind not in _KINDS:
            raise GrammarError(f"{constraint.kind} is not supported")
        if constraint.whitespace_pattern is not None:
            raise GrammarError("whitespace_pattern is not supported")
        if not constraint.any_whitespace:  # without any, the library would forbid spaces in strings, too
            raise GrammarError("disable_any_whitespace is not supported")
        text = constraint.text
        try:
            if constraint.kind == "json":
                schema = normalize(msgspec.json.decode(text), closed=constraint.closed)
                if (gap := keyword_gap(schema, _MISSING) or _gap(schema)) is not None:
                    raise GrammarError(f"{gap} is not supported as it is used here")
                text = msgspec.json.encode(rewrite_patterns(schema, plain_regex)).decode()
                JsonSchemaParser(schema, CharacterLevelParserConfig())
            elif constraint.kind == "regex":
                RegexParser(text)
        except (GrammarError, SchemaError):
            raise
        except Exception as error:  # the parsers may raise anything on a client's text
            raise GrammarError(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}") from None
        return msgspec.msgpack.encode([constraint.kind, text, constraint.max_whitespace or _ENDLESS])


def _gap(schema: Any) -> str | None:
    """A keyword that the library fails on, or ignores, only while outputs are sampled."""
    for node in walk(schema):
        if isinstance(node, dict) and (word := _gap_of(node)) is not None:
            return word
    return None


def _gap_of(node: dict[str, Any]) -> str | None:
    for word in ("anyOf", "$ref"):
        if word in node:
            return None
    for word in ("enum", "const"):
        if word in node:
            values = node[word] if word == "enum" else [node[word]]
            return None if all(isinstance(value, str) for value in values) else word
    kind = node.get("type")
    if not isinstance(kind, str):
        return "type"
    if "pattern" in node:  # the library escapes no characters, takes ASCII alone, and an empty pattern for none
        regex = plain_regex(node["pattern"])
        if regex in (None, "^$") or not regex.isascii():
            return "pattern"
    if kind == "array" and not isinstance(node.get("items"), dict):
        return "items"
    if kind == "object":  # an optional property that is left out would leave its comma
        if not node.get("properties") or set(node.get("required") or ()) != set(node["properties"]):
            return "required"
        return None if node.get("additionalProperties") is False else "additionalProperties"
    return None
