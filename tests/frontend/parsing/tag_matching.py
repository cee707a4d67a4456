"""Matches texts against structural tags, over a vocabulary of bytes."""

from typing import Any

import xgrammar

TOKENS = [bytes([byte]) for byte in range(256)] + [b"</s>"]
INFO = xgrammar.TokenizerInfo(TOKENS, xgrammar.VocabType.RAW, stop_token_ids=[256])


def accepts(tag: dict[str, Any], text: str) -> bool:
    """Whether the whole `text` matches the structural tag."""
    compiled = xgrammar.GrammarCompiler(INFO).compile_grammar(xgrammar.Grammar.from_structural_tag(tag))
    matcher = xgrammar.GrammarMatcher(compiled)
    return bool(matcher.accept_string(text) and matcher.is_completed())
