"""Structural tags for llguidance: XGrammar's notation written in Lark's.

llguidance's lexemes are greedy: `[a-z]+` before `</a>` would never end. So consecutive regular parts become one lexeme.
Free text before a trigger is a lazy lexeme instead.
"""

import json
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from quire.frontend.grammar.backends.backend import GrammarError
from quire.frontend.grammar.backends.lark import as_lark, inline_json, inline_regex, inline_text

_ANY = "/(?s:.*)/"
_FIELDS = {
    "const_string": {"value"},
    "json_schema": {"json_schema"},
    "any_text": {"excludes", "max_chars"},
    "grammar": {"grammar"},
    "regex": {"pattern"},
    "sequence": {"elements"},
    "or": {"elements"},
    "tag": {"begin", "content", "end"},
    "triggered_tags": {"triggers", "tags", "at_least_one", "stop_after_first", "excludes"},
    "tags_with_separator": {"tags", "separator", "at_least_one", "stop_after_first"},
    "optional": {"content"},
    "plus": {"content"},
    "star": {"content"},
    "repeat": {"content", "min", "max"},
}
_NOTHING: dict[str, Any] = {"style": "json", "any_order": False}
"""Other fields, with the only value that they may have; None and an empty list are allowed in every field."""


class _Part(NamedTuple):
    """A Lark expression; `is_regular` if it may be part of a lexeme."""

    text: str
    is_regular: bool


class TagWriter:
    """Writes one structural tag.

    Args:
        write_schema: turns a JSON schema into one for llguidance, with options.
        write_grammar: turns a client's grammar into Lark's notation.
    """

    def __init__(self, write_schema: Callable[[Any], Any], write_grammar: Callable[[str], str]) -> None:
        self._write_schema = write_schema
        self._write_grammar = write_grammar
        self._lines: list[str] = []
        self._grammars: list[dict[str, str]] = []

    def write(self, form: dict[str, Any]) -> str:
        """The grammar of a format, for llguidance.

        Raises:
            GrammarError: only XGrammar supports the format, or a field of it.
        """
        lines = [f"start: {self._rule(self._parts(form, ()))}"]
        lark = as_lark("\n".join([*lines, *self._lines]))
        return json.dumps({"grammars": [{"lark_grammar": lark}, *self._grammars]})

    def _parts(self, form: dict[str, Any], ends: tuple[str, ...]) -> list[_Part]:
        """The consecutive parts of a format; `ends` are texts that end it, so its free text must not contain them."""
        kind = form["type"]
        if kind not in _FIELDS:
            raise GrammarError(f"the format {kind} is not supported in a structural_tag")
        for name, value in form.items():
            known = name == "type" or name in _FIELDS[kind] or value in (None, [])
            if not known and not (name in _NOTHING and value == _NOTHING[name]):
                raise GrammarError(f"{name} of {kind} is not supported in a structural_tag")
        match kind:
            case "const_string":
                return _constant(form["value"])
            case "regex":
                return [_Part(inline_regex(form["pattern"]), True)]
            case "any_text":
                return [_text([*ends, *(form.get("excludes") or ())], form.get("max_chars"))]
            case "json_schema":
                schema = self._write_schema(form["json_schema"])
                return [_Part(inline_json(schema), False)]
            case "grammar":
                return [self._grammar(form["grammar"])]
            case "sequence":
                *first, last = form["elements"]
                return [part for each in first for part in self._parts(each, ())] + self._parts(last, ends)
            case "or":
                return [self._either([self._parts(each, ends) for each in form["elements"]])]
            case "tag":
                return self._tag(form)
            case "tags_with_separator":
                return self._separated(form)
            case "triggered_tags":
                return self._triggered(form, ends)
            case _:
                return [self._repeated(form, _count(form))]

    def _tag(self, form: dict[str, Any], num_skipped: int = 0) -> list[_Part]:
        """A tag without the first `num_skipped` characters of its beginning, which a trigger has matched."""
        begin, ends = form["begin"], form["end"] if isinstance(form["end"], list) else [form["end"]]
        if not isinstance(begin, str) or not all(isinstance(end, str) for end in ends):
            raise GrammarError("begin and end as tokens are not supported in a structural_tag")
        content = self._parts(form["content"], tuple(filter(None, ends)))
        return [*_constant(begin[num_skipped:]), *content, self._either([_constant(end) for end in ends])]

    def _separated(self, form: dict[str, Any]) -> list[_Part]:
        tags = self._either([self._parts(each, ()) for each in form["tags"]])
        one, more = self._rule([tags]), self._rule([*_constant(form["separator"]), tags])
        text = f"({one})" if form.get("stop_after_first") else f"({one}) ({more})*"
        return [_Part(text if form.get("at_least_one") else f"({text})?", False)]

    def _triggered(self, form: dict[str, Any], ends: tuple[str, ...]) -> list[_Part]:
        excludes = [*ends, *(form.get("excludes") or ())]
        heads = {trigger: self._head(trigger, excludes) for trigger in form["triggers"]}
        calls = []
        for tag in form["tags"]:
            trigger = next(trigger for trigger in form["triggers"] if tag["begin"].startswith(trigger))
            calls.append(f"{heads[trigger]} ({self._rule(self._tag(tag, len(trigger)))})")
        call, rest = f"({' | '.join(calls)})", _text([*excludes, *form["triggers"]])
        if form.get("at_least_one"):  # the text begins with a tag
            first = self._either([self._tag(tag) for tag in form["tags"]])
            return [first] if form.get("stop_after_first") else [first, _Part(f"{call}*", False), rest]
        if form.get("stop_after_first"):
            return [_Part(f"({call} | {self._lexeme(rest.text)})", False)]
        return [_Part(f"{call}*", False), rest]

    def _head(self, trigger: str, excludes: Iterable[str]) -> str:
        """Writes a lexeme for free text up to a trigger, and returns its name."""
        name = f"head{len(self._lines)}"
        self._lines.append(f"{name}[lazy]: {self._lexeme(f'{_text(excludes).text} {inline_text(trigger)}')}")
        return name

    def _grammar(self, text: str) -> _Part:
        name = f"grammar{len(self._grammars)}"
        self._grammars.append({"name": name, "lark_grammar": as_lark(self._write_grammar(text))})
        return _Part(f"@{name}", False)

    def _repeated(self, form: dict[str, Any], count: str) -> _Part:
        parts = self._parts(form["content"], ())
        if all(part.is_regular for part in parts):
            return _Part(f"({_joined(parts)}){count}", True)
        return _Part(f"({self._rule(parts)}){count}", False)

    def _either(self, alternatives: list[list[_Part]]) -> _Part:
        if all(part.is_regular for parts in alternatives for part in parts):
            return _Part(f"({' | '.join(map(_joined, alternatives))})", True)
        return _Part(f"({' | '.join(map(self._rule, alternatives))})", False)

    def _rule(self, parts: list[_Part]) -> str:
        """An expression for a rule; consecutive regular parts are one lexeme."""
        words: list[str] = []
        regular: list[_Part] = []
        for part in [*parts, _Part("", False)]:
            if part.is_regular:
                regular.append(part)
                continue
            if regular:
                words.append(self._lexeme(_joined(regular)))
                regular = []
            words.append(part.text)
        return " ".join(filter(None, words)) or '""'

    def _lexeme(self, text: str) -> str:
        name = f"LEXEME{len(self._lines)}"
        self._lines.append(f"{name}: {text}")
        return name


def _joined(parts: list[_Part]) -> str:
    return " ".join(part.text for part in parts) or '""'


def _constant(text: str) -> list[_Part]:
    return [_Part(inline_text(text), True)] if text else []


def _text(excludes: Iterable[str], max_chars: int | None = None) -> _Part:
    """Free text that contains none of `excludes`."""
    text = _ANY if max_chars is None else f"/(?s:.{{0,{max_chars}}})/"
    texts = " | ".join(map(inline_text, excludes))
    return _Part(f"({text} & ~({_ANY} ({texts}) {_ANY}))" if texts else text, True)


def _count(form: dict[str, Any]) -> str:
    if form["type"] != "repeat":
        return {"optional": "?", "plus": "+", "star": "*"}[form["type"]]
    return f"{{{form['min']},{'' if form['max'] < 0 else form['max']}}}"
