"""Checks the fields that come with a prompt, for each protocol and for programs."""

import math
from typing import Any, TypeVar

from quire.core.errors import ParameterError

T = TypeVar("T")

MAX_SALT_CHARACTERS = 1024


def check_id(request_id: Any) -> None:
    """Raises ParameterError unless a request's id is text that a message can hold."""
    if not isinstance(request_id, str):
        raise ParameterError(
            f"request_id must be a string, not {type(request_id).__name__}; give str(request_id).", param="request_id"
        )
    check_text("request_id", request_id)


def check_salt(salt: Any) -> None:
    """Raises ParameterError for a cache_salt that is no text, empty or very long."""
    if salt is None:
        return
    if not isinstance(salt, str):
        raise ParameterError(f"cache_salt must be a string, not {type(salt).__name__}.", param="cache_salt")
    if not salt:
        raise ParameterError("cache_salt must not be empty; leave it out instead.", param="cache_salt")
    if len(salt) > MAX_SALT_CHARACTERS:
        raise ParameterError(f"cache_salt must have at most {MAX_SALT_CHARACTERS} characters.", param="cache_salt")
    check_text("cache_salt", salt)


def check_text(name: str, text: str) -> None:
    """Raises ParameterError unless `text` is a plain string of valid Unicode, as messages hold it."""
    if type(text) is not str or (not text.isascii() and any("\ud800" <= each <= "\udfff" for each in text)):
        raise ParameterError(f"{name} must be a plain string without lone surrogates.", param=name)


def check_priority(priority: Any) -> None:
    """Raises ParameterError unless the priority is an integer within the engine's range."""
    if priority is not None and type(priority) is not int:
        raise ParameterError(f"priority must be a whole number, got {priority!r}.", param="priority")
    if priority is not None and not -(2**63) <= priority < 2**63:
        raise ParameterError("priority must fit in 64 bits.", param="priority")


def check_arrival_time(seconds: Any) -> None:
    """Raises ParameterError unless `seconds` is a time."""
    if seconds is not None and not (isinstance(seconds, (int, float)) and math.isfinite(seconds)):
        raise ParameterError(f"arrival_time must be Unix seconds, got {seconds!r}.", param="arrival_time")


def check_params(params: Any, kind: type[T]) -> T:
    """`params`; raises ParameterError unless they are of this kind."""
    if not isinstance(params, kind):
        raise ParameterError(f"The parameters must be {kind.__name__}, not {type(params).__name__}.", param="params")
    return params
