"""Rules for strings of a schema that XGrammar does not enforce: strings with a Lark grammar, a pattern or a length.

XGrammar writes Lark as rules over characters. Within JSON, each character of a rule is replaced by its escape. That is
a homomorphism with a prefix code, so the rules then describe exactly the escaped texts. The same holds for the
characters of a pattern, which XGrammar would put into JSON as they are. For a string with a length, XGrammar would
allow control characters and no escapes.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from quire.frontend.grammar.backends.backend import GrammarError
from quire.frontend.grammar.characters import ALL, Ranges, common, complement, in_json
from quire.frontend.grammar.pattern_notations import as_json_regex, as_regex, plain_regex
from quire.frontend.grammar.pattern_tree import Chars, Node, Repeat
from quire.frontend.grammar.patterns import read_pattern
from quire.frontend.grammar.schema import LARK, walk
from quire.frontend.grammar.unenforced_keywords import is_long

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|[A-Za-z_][\w.-]*[(\[]?|\s+|.', re.DOTALL)
_CHARACTER = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)|.", re.DOTALL)
_SHORT = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "a": "\a", "e": "\x1b", "0": "\0"}


class TextRules:
    """The strings of one constraint that need separate rules. A constant replaces each while the rest is compiled.

    Args:
        to_rules: XGrammar's rules for a Lark grammar, as text.
    """

    def __init__(self, to_rules: Callable[[str], str]) -> None:
        self._to_rules = to_rules
        self._definitions: dict[str, str | Node] = {}  # by placeholder: a Lark grammar, or a pattern

    def __bool__(self) -> bool:
        return bool(self._definitions)

    def take_lark(self, schema: Any) -> None:
        """Replaces strings with a Lark grammar, in place."""
        for node in walk(schema):
            if isinstance(node, dict) and LARK in node:
                definition = node[LARK]
                if not isinstance(definition, str) or set(node) - {LARK, "type", "description", "title"}:
                    raise GrammarError(f"{LARK} must be a Lark grammar, and the only keyword of its string")
                node.clear()
                node["const"] = self._placeholder(definition, definition)

    def take_strings(self, schema: Any) -> None:
        """Replaces strings of characters that JSON escapes, by pattern or length, in place; rewrites other patterns."""
        for node in walk(schema):
            if not isinstance(node, dict) or not _allows_strings(node):
                continue
            if isinstance(node.get("pattern"), str):
                pattern = node.pop("pattern")
                if (plain := plain_regex(pattern)) is not None:
                    node["pattern"] = plain
                else:
                    self._take(node, pattern, read_pattern(pattern))
            elif any(word in node for word in ("minLength", "maxLength")) and not is_long(node):
                least, most = node.pop("minLength", None) or 0, node.pop("maxLength", None)
                if most is not None and most < least:
                    raise GrammarError("maxLength is less than minLength")
                self._take(node, f"length {least} {most}", Repeat(Chars(tuple(ALL)), least, most))

    def _take(self, node: dict[str, Any], text: str, definition: Node) -> None:
        """Replaces the strings that a schema allows, and leaves its other types."""
        constant = {"const": self._placeholder(text, definition)}
        kinds = [node["type"]] if isinstance(node["type"], str) else node["type"]
        others = {**node, "type": [kind for kind in kinds if kind != "string"]}
        node.clear()
        node |= {"anyOf": [constant, others]} if others["type"] else constant

    def _placeholder(self, text: str, definition: str | Node) -> str:
        placeholder = f"text-{hashlib.sha256(text.encode()).hexdigest()}"
        self._definitions[placeholder] = definition
        return placeholder

    def put_into(self, rules: str) -> str:
        """The rules of the whole constraint, with the strings' rules in place of the constants.

        Raises:
            GrammarError: a Lark grammar is malformed, or has a part other than characters.
        """
        added: dict[str, str] = {}
        for number, (placeholder, definition) in enumerate(self._definitions.items()):
            for quote in ('\\"', ""):
                constant = quote + placeholder + quote
                if constant in rules:
                    prefix = f"text{number}_{'json' if quote else 'raw'}_"
                    rules = rules.replace(constant, f'{quote}" {prefix}root "{quote}')
                    added[prefix] = self._rules(definition, prefix, is_json=bool(quote))
        return "\n".join([rules, *added.values()])

    def _rules(self, definition: str | Node, prefix: str, *, is_json: bool) -> str:
        if isinstance(definition, str):
            return _rewritten(self._to_rules(definition), prefix, _in_json if is_json else _as_it_is)
        regex = as_json_regex(definition) if is_json else as_regex(definition)
        return f"{prefix}root ::= Regex({json.dumps(regex, ensure_ascii=False)})"


def _allows_strings(node: dict[str, Any]) -> bool:
    return node.get("type") == "string" or "string" in node.get("type", ())


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
    return in_json(ranges, _as_it_is, lambda text: json.dumps(text) + " ") if ranges else "[]"


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
    return common(complement(ranges), ALL) if negated else common(ranges, ALL)


def _characters(text: str) -> Iterable[str]:
    return map(_character, _CHARACTER.findall(text))


def _character(piece: str) -> str:
    if piece[0] != "\\":
        return piece
    return chr(int(piece[2:], 16)) if len(piece) > 2 else _SHORT.get(piece[1], piece[1])


def _written(ranges: Ranges) -> str:
    return "".join(f"\\U{low:08x}" if low == high else f"\\U{low:08x}-\\U{high:08x}" for low, high in ranges)
