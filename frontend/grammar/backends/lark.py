"""Parts of grammars in llguidance's dialect of Lark."""

import json
from typing import Any

from quire.frontend.grammar.backends.backend import GrammarError


def as_lark(rules: str) -> str:
    """A whole grammar, without forced tokens.

    If only one text can follow, llguidance would force its tokenizer's tokens for that text. Workers have no tokenizer,
    so the model chooses the tokens.
    """
    return f'%llguidance {{"no_forcing": true}}\n{rules}'


def inline_text(text: str) -> str:
    """A string as part of a rule or lexeme."""
    return json.dumps(text, ensure_ascii=False)


def inline_json(schema: Any) -> str:
    """A schema as part of a rule."""
    return f"%json {json.dumps(schema, ensure_ascii=False)}"


def inline_regex(pattern: str) -> str:
    """A pattern between slashes, with its own slashes and newlines escaped.

    Raises:
        GrammarError: the pattern ends with a single backslash, which would escape the closing slash.
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
