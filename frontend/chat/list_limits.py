"""Limits on lists that are read again for every completion of a request."""

from collections.abc import Mapping
from typing import Any

from quire.core.errors import ParameterError

MAX_LISTED = 2**22
"""Token ids, and characters of words, times completions. The lists are sent and kept once for each
prompt, but a worker reads them within a step for each completion that begins."""

MAX_STOP_CHARACTERS = 2**18
"""Characters of stop strings times completions: each stop string is searched for in every piece of text."""


def check_lists(sampling: Mapping[str, Any], num_completions: int) -> None:
    """Refuses lists that are too long for `num_completions`.

    Args:
        sampling: the client's fields, as SamplingParams keywords.

    Raises:
        ParameterError: the field, by name.
    """
    stop = sampling.get("stop") or []
    stops = [stop] if isinstance(stop, str) else stop
    _check("stop", sum(map(len, stops)), num_completions, MAX_STOP_CHARACTERS, "characters")
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        _check(name, len(sampling.get(name) or ()), num_completions, MAX_LISTED, "token ids")
    _check("bad_words", sum(map(len, sampling.get("bad_words") or ())), num_completions, MAX_LISTED, "characters")


def _check(name: str, size: int, num_completions: int, most: int, unit: str) -> None:
    if size * num_completions > most:
        raise ParameterError(
            f"{name} holds {size} {unit}, which for {num_completions} completion(s) is more than {most}; "
            "shorten it, or ask for fewer at once.",
            param=name,
        )
