"""The time that a caller gives a request. It follows the request through all tasks that work on it."""

import math
import time
from contextvars import ContextVar
from typing import Any, NamedTuple

from quire.core.errors import DeadlineError, ParameterError

HEADER = "X-Request-Timeout"


class Deadline(NamedTuple):
    """The end of a request's time.

    Attributes:
        at: seconds of `time.monotonic`.
        seconds: from the request's arrival to then.
    """

    at: float
    seconds: float

    def error(self) -> DeadlineError:
        """The error of a request whose time is over."""
        return DeadlineError(f"The request was not finished within its timeout of {self.seconds:g} s.")

    def check(self) -> None:
        """Raises DeadlineError when the time is over."""
        if time.monotonic() >= self.at:
            raise self.error()


_DEADLINE: ContextVar[Deadline | None] = ContextVar("deadline", default=None)


def limit_time(header: str | None, field: float | None) -> None:
    """Sets the deadline of the running task, and of those that it starts, from the header and the field `timeout`.

    The shorter one holds; with neither, there is no limit.

    Raises:
        ParameterError: one of them is no time in seconds.
    """
    limits = [_seconds(HEADER, header), _seconds("timeout", field)]
    seconds = min((each for each in limits if each is not None), default=None)
    _DEADLINE.set(None if seconds is None else Deadline(time.monotonic() + seconds, seconds))


def current_deadline() -> Deadline | None:
    """The deadline of the task that runs."""
    return _DEADLINE.get()


def _seconds(name: str, given: Any) -> float | None:
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ParameterError(f"{name} must be a number of seconds above 0, got {given!r:.100}.", param=name)
    return seconds
