"""Checks of the sampling parameters that hold lists, and the limits on their lengths.

This file knows no vocabulary: the frontend checks whether an id exists.
"""

from typing import Any

import msgspec

from quire.core.errors import ParameterError

MAX_LOGIT_BIAS = 1024
"""Entries of logit_bias."""
MAX_BIAS = 100.0

MAX_LOGPROB_TOKEN_IDS = 128

MAX_BAD_WORDS = 1024
MAX_BAD_WORD_CHARACTERS = 65536
"""Over all bad words of a request."""

MAX_STOPS = 1024
MAX_STOP_CHARACTERS = 65536
"""Over all stop strings of a request."""


def check_stops(stops: Any) -> None:
    """Raises ParameterError unless `stops` are strings, not too many and not too long."""
    if not is_list_of(str, stops):
        raise ParameterError("stop must be a string or a list of strings.", param="stop")
    if not all(stops):
        raise ParameterError("stop must not hold an empty string.", param="stop")
    if len(stops) > MAX_STOPS:
        raise ParameterError(f"stop holds {len(stops)} strings; at most {MAX_STOPS} are allowed.", param="stop")
    if sum(map(len, stops)) > MAX_STOP_CHARACTERS:
        raise ParameterError(
            f"stop strings are longer than {MAX_STOP_CHARACTERS} characters in all; shorten them.", param="stop"
        )


def check_logit_bias(logit_bias: Any) -> None:
    """Raises ParameterError unless `logit_bias` maps ids to values in range, with at most `MAX_LOGIT_BIAS` entries."""
    if not isinstance(logit_bias, dict) or any(type(token_id) is not int for token_id in logit_bias):
        raise ParameterError("logit_bias must map token ids to numbers.", param="logit_bias")
    if len(logit_bias) > MAX_LOGIT_BIAS:
        raise ParameterError(
            f"logit_bias has {len(logit_bias)} entries; at most {MAX_LOGIT_BIAS} are allowed.", param="logit_bias"
        )
    for token_id, bias in logit_bias.items():
        if isinstance(bias, bool) or not isinstance(bias, (int, float)) or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise ParameterError(
                f"logit_bias of token {token_id} must be a number between {-MAX_BIAS:g} and {MAX_BIAS:g}, "
                f"got {bias!r}.",
                param="logit_bias",
            )


def read_logit_bias(logit_bias: dict[Any, float]) -> dict[int, float]:
    """Converts the ids of `logit_bias` to integers, and clamps the biases to their limits."""
    try:
        return {int(token_id): min(MAX_BIAS, max(-MAX_BIAS, bias)) for token_id, bias in logit_bias.items()}
    except (ValueError, TypeError):
        raise ParameterError("logit_bias must map token ids to numbers.", param="logit_bias") from None


def check_allowed_token_ids(token_ids: Any) -> None:
    """Raises ParameterError unless `token_ids` are ids, at least one."""
    if not is_list_of(int, token_ids):
        raise ParameterError("allowed_token_ids must be a list of token ids.", param="allowed_token_ids")
    if not token_ids:
        raise ParameterError(
            "allowed_token_ids must not be empty: nothing could be sampled. Leave it out to allow all tokens.",
            param="allowed_token_ids",
        )


def check_bad_words(words: Any) -> None:
    """Raises ParameterError unless `words` are words, not too many and not too long."""
    if not is_list_of(str, words):
        raise ParameterError("bad_words must be a list of strings.", param="bad_words")
    if len(words) > MAX_BAD_WORDS:
        raise ParameterError(
            f"bad_words holds {len(words)} words; at most {MAX_BAD_WORDS} are allowed.", param="bad_words"
        )
    if any(not word.strip() for word in words):
        raise ParameterError("bad_words must not hold an empty word.", param="bad_words")
    if sum(map(len, words)) > MAX_BAD_WORD_CHARACTERS:
        raise ParameterError(
            f"bad_words are longer than {MAX_BAD_WORD_CHARACTERS} characters in all; shorten the list.",
            param="bad_words",
        )


def check_extra_args(extra_args: Any, name: str = "extra_args") -> None:
    """Raises ParameterError that names the field `name` unless it has string keys, and values that fit a message."""
    if not isinstance(extra_args, dict) or any(not isinstance(key, str) for key in extra_args):
        raise ParameterError(f"{name} must map names to values.", param=name)
    try:
        msgspec.msgpack.encode(extra_args)
    except OverflowError:
        raise ParameterError(f"{name}: whole numbers must fit in 64 bits.", param=name) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise ParameterError(f"{name} cannot be sent to the engine: {error}.", param=name) from None


def check_token_ids(name: str, token_ids: Any, most: int) -> None:
    """Raises ParameterError that names the field `name` unless `token_ids` are at most `most` ids."""
    if not is_list_of(int, token_ids):
        raise ParameterError(f"{name} must be a list of token ids.", param=name)
    if len(token_ids) > most:
        raise ParameterError(f"{name} holds {len(token_ids)} ids; at most {most} are allowed.", param=name)


def check_id_rows(name: str, rows: Any) -> None:
    """Raises ParameterError that names the field `name` unless `rows` are lists of ids or -1, at least one with any."""
    if not isinstance(rows, list) or not all(is_list_of(int, row) for row in rows):
        raise ParameterError(f"{name} must be a list of lists of token ids, or an array.", param=name)
    if not any(rows):
        raise ParameterError(f"{name} holds no ids; leave it out.", param=name)


def is_list_of(kind: type, value: Any) -> bool:
    """Returns True if `value` is a list or tuple of exactly this type (a bool is no int here)."""
    return isinstance(value, (list, tuple)) and all(type(item) is kind for item in value)
