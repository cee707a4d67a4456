"""Detects outputs that repeat the same few tokens, and ends them for requests that ask for it."""

from collections.abc import Sequence

from msgspec import Struct

from quire.core.errors import ParameterError

MAX_PATTERN_SIZE = 256
"""Longest pattern. Every new token is compared with patterns of every length up to this."""
MAX_COUNT = 2**20


class RepetitionDetection(Struct, kw_only=True, forbid_unknown_fields=True):
    """The repetitions that end an output, with vLLM's names and defaults.

    The output ends as soon as its last tokens are some pattern of `min_pattern_size` to `max_pattern_size` tokens,
    `min_count` times in a row. `max_pattern_size=0` looks for nothing.

    Raises:
        ParameterError: a size or count is out of its range.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0  # 0 is 1
    min_count: int = 0

    def __post_init__(self) -> None:
        for value in (self.max_pattern_size, self.min_pattern_size, self.min_count):
            if type(value) is not int or value < 0:
                raise _error(f"sizes and counts must be whole numbers from 0 up, got {value!r}.")
        if self.max_pattern_size > MAX_PATTERN_SIZE:
            raise _error(f"max_pattern_size must be at most {MAX_PATTERN_SIZE}, got {self.max_pattern_size}.")
        if self.min_pattern_size > self.max_pattern_size:
            raise _error(
                f"min_pattern_size ({self.min_pattern_size}) must not exceed max_pattern_size "
                f"({self.max_pattern_size})."
            )
        if self.max_pattern_size and not 2 <= self.min_count <= MAX_COUNT:
            raise _error(f"min_count must be at least 2 and at most {MAX_COUNT}, got {self.min_count}.")

    def found_at_end(self, token_ids: Sequence[int]) -> bool:
        """Returns True if the tokens of an output end in such a repetition."""
        length = len(token_ids)
        for size in range(max(1, self.min_pattern_size), self.max_pattern_size + 1):
            span = size * self.min_count
            if span > length:
                return False
            # The end repeats a pattern of this size if it equals itself shifted by `size` tokens.
            if token_ids[-1] == token_ids[-1 - size] and token_ids[-span:-size] == token_ids[size - span :]:
                return True
        return False


def _error(message: str) -> ParameterError:
    return ParameterError(f"repetition_detection: {message}", param="repetition_detection")
