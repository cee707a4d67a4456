"""Pieces of grammars in llguidance's kind of Lark."""

import json
from typing import Any

from quire.frontend.grammar.backends.backend import GrammarError


def as_lark(rules: str) -> str:
    """A whole grammar, in which no token is forced.

    Where only one text can follow, llguidance would allow one way to split it into tokens alone, as its tokenizer does.
    Workers have no tokenizer, so the model chooses.
    """
    return f'%llguidance {{"no_forcing": true}}\n{rules}'


def inline_text(text: str) -> str:
    """A string as a piece of a rule or lexeme."""
    return json.dumps(text, ensure_ascii=False)


def inline_json(schema: Any) -> str:
    """A schema as a piece of a rule."""
    return f"%json {json.dumps(schema, ensure_ascii=False)}"


def inline_regex(pattern: str) -> str:
    """A pattern between slashes, in which a slash of its own and the end of a line must not stand as they are.

    Raises:
        GrammarError: it ends within an escape, which would be the closing slash.
    """
    out, is_escaped = [], False
    for character in pattern:
        if character == "/" and not is_escaped:
            out.append("\\")
        out.append(("n" if is_escaped else "\\n") if character == "\n" else character)
        is_escaped = character == "\\" and not is_escaped
    if is_escaped:
        raise GrammarError(f"the pattern {pattern[-20:]!r} ends with a single backslash")
    return f"/{''.join(out)}/" if pattern else '""'
