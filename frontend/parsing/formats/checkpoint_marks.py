"""Reads a checkpoint's own description of the marks in its answers."""

from typing import Any, NamedTuple

from quire.frontend.parsing.token_suffix import find_suffix
from quire.frontend.text.tokenizer import Tokenizer


class CheckpointMarks(NamedTuple):
    """The description of whole answers that the parsers `hf` read, and a suffix of all marks."""

    response_template: dict[str, Any] | None = None
    suffix: str = ""


def read_marks(tokenizer: Tokenizer | None) -> CheckpointMarks:
    """Reads the tokenizer's files; the result is empty without a tokenizer."""
    if tokenizer is None:
        return CheckpointMarks()
    config = tokenizer.read_config()
    tokens = (tokenizer.token(token_id) or "" for token_id in sorted(tokenizer.added_token_ids))
    return CheckpointMarks(config.get("response_template"), find_suffix(config, tokens))
