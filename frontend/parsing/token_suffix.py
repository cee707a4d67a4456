"""The suffix that some checkpoints have in each of their marks: `<tool_calls:6124c78e>` for `<tool_calls>`."""

import re
from collections.abc import Iterable
from typing import Any

_MARK = re.compile(r"<(/?\w+)>")
_SUFFIXED = re.compile(r"<(?:think|tool_calls|tool_call|arg_key|arg_value)(:[^\s>]+)>")


def find_suffix(config: dict[str, Any], tokens: Iterable[str]) -> str:
    """The suffix with its colon; empty for a checkpoint without one.

    Args:
        config: tokenizer_config.json, which may name it as `token_suffix`.
        tokens: the vocabulary's added tokens, which may show it.
    """
    named = config.get("token_suffix")
    if isinstance(named, str):
        return named
    return next((match[1] for token in tokens if (match := _SUFFIXED.fullmatch(token))), "")


def suffix_marks(value: Any, suffix: str) -> Any:
    """`value`, a text or texts, with the suffix in every mark; anything else unchanged."""
    if isinstance(value, str):
        return _MARK.sub(rf"<\1{suffix}>", value)
    if isinstance(value, tuple):
        return tuple(suffix_marks(each, suffix) for each in value)
    if isinstance(value, dict):
        return {suffix_marks(key, suffix): each for key, each in value.items()}
    return value
