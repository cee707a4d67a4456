"""outlines-core: regular expressions, compiled to a table of all states and tokens; JSON schemas become expressions."""

import json
import string

from outlines_core import Index, Vocabulary, json_schema

from quire.core.wire import protocol
from quire.frontend.grammar.backends.backend import GrammarError
from quire.frontend.grammar.constraint import Constraint
from quire.frontend.grammar.normalized import normalize
from quire.frontend.grammar.pattern_notations import json_regex, rewrite_patterns, write_lengths
from quire.frontend.grammar.unenforced_keywords import NUMBER_WORDS, keyword_gap

_MISSING = frozenset({*NUMBER_WORDS, "minProperties", "maxProperties", "patternProperties", "unevaluatedItems"})
_ONE_LINE = r"[ ]?"
_ANY_WHITESPACE = r"[\n\t ]*"
_LINE_AND_INDENTATION = r"([ ]|\n[ ]{{0,{}}})?"  # a table of states grows with every other choice


_END_MARK = "\U0010ffff"
"""Follows each text, as a token that the model does not have.

From a state in which a text may end, the library offers only tokens after which it may end again: with the choices
`yes` and `yes please`, the second could not be written. With the mark, a text may end only after the mark. No token may
spell the mark's bytes, so tokens with its first byte are left out. Only characters of plane 16 (private use) have it.
"""


class OutlinesBackend:
    """Compiles constraints with outlines-core."""

    def __init__(self, vocabulary: protocol.Vocabulary) -> None:
        ids: dict[str | bytes, list[int]] = {}
        for token_id, piece in enumerate(vocabulary.tokens):
            if piece and _END_MARK.encode()[:1] not in piece:
                ids.setdefault(piece, []).append(token_id)
        ids[_END_MARK.encode()] = [len(vocabulary.tokens)]
        self._vocabulary = Vocabulary(vocabulary.end_token_ids[0], ids)

    def compile(self, constraint: Constraint) -> bytes:
        try:
            index = Index(f"({_regex(constraint)}){_END_MARK}", self._vocabulary)
        except (ValueError, TypeError, NotImplementedError) as error:
            raise GrammarError(" ".join(str(error).split())[:300]) from None
        _, (data,) = index.__reduce__()  # the binary form that pickle stores
        return data


def _regex(constraint: Constraint) -> str:
    text = constraint.text
    match constraint.kind:
        case "json" | "json_object":
            schema = normalize(json.loads(text), closed=constraint.closed) if text else {"type": "object"}
            if (gap := keyword_gap(schema, _MISSING)) is not None:
                raise GrammarError(f"{gap} is not supported as it is used here")
            rewrite_patterns(write_lengths(schema), json_regex)
            return json_schema.build_regex_from_schema(json.dumps(schema), _whitespace(constraint))
        case "regex":
            return _without_anchors(text)
        case "choice":
            return "|".join(f"({_literal(choice)})" for choice in json.loads(text))
        case kind:
            raise GrammarError(f"{kind} is not supported")


def _whitespace(constraint: Constraint) -> str:
    """The pattern of whitespace between tokens of JSON."""
    if constraint.whitespace_pattern is not None:
        return constraint.whitespace_pattern
    if not constraint.any_whitespace:
        return _ONE_LINE
    most = constraint.max_whitespace
    return _ANY_WHITESPACE if most is None else _LINE_AND_INDENTATION.format(most - 1)


def _without_anchors(pattern: str) -> str:
    """A pattern for the whole text, without its redundant anchors, because the mark follows."""
    pattern = pattern.removeprefix("^")
    num_backslashes = len(pattern) - 1 - len(pattern.removesuffix("$").rstrip("\\"))
    return pattern.removesuffix("$") if num_backslashes % 2 == 0 else pattern


def _literal(text: str) -> str:
    return "".join("\\" + character if character in string.punctuation else character for character in text)
