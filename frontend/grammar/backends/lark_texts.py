"""Strings in a schema that have to follow a client's Lark grammar: the keyword `x-lark`, for XGrammar.

XGrammar writes Lark as rules over characters. Within JSON, each character of a rule is replaced by its escape. That is
a homomorphism with a prefix code, so the rules then describe exactly the escaped texts, whatever their shape.
"""

import hashlib
import re
from collections.abc import Callable, Iterable
from typing import Any

from quire.frontend.grammar.backends.backend import GrammarError
from quire.frontend.grammar.schema import LARK, walk

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|[A-Za-z_][\w.-]*[(\[]?|\s+|.', re.DOTALL)
_CHARACTER = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)|.", re.DOTALL)
_SHORT = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "a": "\a", "e": "\x1b", "0": "\0"}
_ESCAPES = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
"""The letter after the backslash, by character (RFC 8259, section 7)."""

Ranges = list[tuple[int, int]]

_ALL: Ranges = [(0, 0xD7FF), (0xE000, 0x10FFFF)]
_PLAIN: Ranges = [(0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, 0x10FFFF)]
"""Characters that JSON writes as they are."""


class LarkTexts:
    """The strings of one constraint that follow Lark grammars; constants stand for them while the rest is compiled.

    Args:
        to_rules: XGrammar's rules for a Lark grammar, as text.
    """

    def __init__(self, to_rules: Callable[[str], str]) -> None:
        self._to_rules = to_rules
        self._definitions: dict[str, str] = {}  # by placeholder

    def __bool__(self) -> bool:
        return bool(self._definitions)

    def take_from(self, schema: Any) -> None:
        """Replaces strings with a Lark grammar, in place."""
        for node in walk(schema):
            if isinstance(node, dict) and LARK in node:
                definition = node[LARK]
                if not isinstance(definition, str) or set(node) - {LARK, "type", "description", "title"}:
                    raise GrammarError(f"{LARK} must be a Lark grammar, and the only keyword of its string")
                placeholder = f"lark-{hashlib.sha256(definition.encode()).hexdigest()}"
                self._definitions[placeholder] = definition
                node.clear()
                node["const"] = placeholder

    def put_into(self, rules: str) -> str:
        """The rules of the whole constraint, with the grammars in the place of the constants.

        Raises:
            GrammarError: a grammar is malformed, or has a part that is not made of characters.
        """
        added: dict[str, str] = {}
        for number, (placeholder, definition) in enumerate(self._definitions.items()):
            for quote, write in (('\\"', _in_json), ("", _as_it_is)):
                constant = quote + placeholder + quote
                if constant in rules:
                    prefix = f"lark{number}_{'json' if quote else 'text'}_"
                    rules = rules.replace(constant, f'{quote}" {prefix}root "{quote}')
                    added[prefix] = _rewritten(self._to_rules(definition), prefix, write)
        return "\n".join([rules, *added.values()])


def _rewritten(rules: str, prefix: str, write: Callable[[Ranges], str]) -> str:
    """Rules with a prefix before each name, and each character written by `write`."""
    out = []
    for token in _TOKEN.findall(rules):
        if token[0] == '"':
            characters = [ord(each) for each in _characters(token[1:-1])]
            out.append(f"({' '.join(write([(each, each)]) for each in characters)})" if characters else token)
        elif token[0] == "[":
            out.append(write(_class(token[1:-1])))
        elif token[-1] in "([" and len(token) > 1:  # XGrammar's own functions, and options of rules
            raise GrammarError(f"a Lark grammar for a string cannot have {_other(token)}")
        else:
            out.append(prefix + token if token[0].isalpha() or token[0] == "_" else token)
    return "".join(out)


def _other(token: str) -> str:
    if token[-1] == "[":
        return "rules with options"
    return "regular expressions with flags" if token == "Regex(" else "special tokens"


def _as_it_is(ranges: Ranges) -> str:
    return f"[{_written(ranges)}]"


def _in_json(ranges: Ranges) -> str:
    """The escapes of some characters. Each character has one: its letter if there is one, and only if it needs one."""
    ways = [f"[{_written(plain)}]"] if (plain := _common(ranges, _PLAIN)) else []
    letters = [(ord(letter), ord(letter)) for each, letter in _ESCAPES.items() if _has(ranges, ord(each))]
    if letters:
        ways.append(f'"\\\\" [{_written(letters)}]')
    for high in (0, 1):
        codes = [low for low in range(16) if _has(ranges, code := 16 * high + low) and chr(code) not in _ESCAPES]
        if codes:
            digits = [(ord(f"{low:x}"), ord(f"{low:x}")) for low in codes]
            ways.append(f'"\\\\u00{high}" [{_written(digits)}]')
    return f"({' | '.join(ways)})" if ways else "[]"


def _class(text: str) -> Ranges:
    """The characters of a class in XGrammar's notation, without its brackets."""
    negated = text.startswith("^")
    pieces = _CHARACTER.findall(text[negated:])
    ranges: Ranges = []
    while pieces:
        low = high = ord(_character(pieces.pop(0)))
        if len(pieces) > 1 and pieces[0] == "-":
            high = ord(_character(pieces[1]))
            del pieces[:2]
        ranges.append((low, high))
    return _common(_complement(ranges), _ALL) if negated else _common(ranges, _ALL)


def _characters(text: str) -> Iterable[str]:
    return map(_character, _CHARACTER.findall(text))


def _character(piece: str) -> str:
    if piece[0] != "\\":
        return piece
    return chr(int(piece[2:], 16)) if len(piece) > 2 else _SHORT.get(piece[1], piece[1])


def _complement(ranges: Ranges) -> Ranges:
    out, start = [], 0
    for low, high in sorted(ranges):
        if low > start:
            out.append((start, low - 1))
        start = max(start, high + 1)
    return [*out, (start, 0x10FFFF)] if start <= 0x10FFFF else out


def _common(ranges: Ranges, others: Ranges) -> Ranges:
    pairs = ((max(low, first), min(high, last)) for low, high in ranges for first, last in others)
    return [(low, high) for low, high in pairs if low <= high]


def _has(ranges: Ranges, code: int) -> bool:
    return any(low <= code <= high for low, high in ranges)


def _written(ranges: Ranges) -> str:
    return "".join(f"\\U{low:08x}" if low == high else f"\\U{low:08x}-\\U{high:08x}" for low, high in ranges)
