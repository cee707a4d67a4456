"""The length of the longest output that a constraint allows, for constraints whose text shows it."""

from quire.core.errors import ParameterError
from quire.core.wire.structured_outputs import StructuredOutputsParams
from quire.frontend.grammar.pattern_reader import PatternError
from quire.frontend.grammar.pattern_tree import longest
from quire.frontend.grammar.patterns import read_pattern

_CHARACTER_BYTES = 4
"""The most bytes of a character in UTF-8."""


def check_min_tokens(params: StructuredOutputsParams, min_tokens: int) -> None:
    """Raises ParameterError if no output of the constraint has `min_tokens` tokens: each has a byte at least."""
    if not min_tokens:
        return
    num_bytes = _max_bytes(params)
    if num_bytes is not None and num_bytes < min_tokens:
        raise ParameterError(
            f"min_tokens is {min_tokens}, and structured_outputs.{params.kind} allows no output of more than "
            f"{num_bytes} bytes, so no more tokens; lower min_tokens.",
            param="min_tokens",
        )


def _max_bytes(params: StructuredOutputsParams) -> int | None:
    """The bytes of the longest output, or more; None if its length is unlimited or unknown."""
    if params.choice:
        return max(len(choice.encode(errors="replace")) for choice in params.choice)
    if params.regex:
        try:
            length = longest(read_pattern(f"^(?:{params.regex})$"))
        except PatternError:
            return None
        return None if length is None else _CHARACTER_BYTES * length
    return None
