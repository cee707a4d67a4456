"""Takes the answer from a reasoning parser, and describes it to the parser."""

from collections.abc import Callable
from typing import Literal, TypeAlias

from msgspec import Struct

from quire.frontend.parsing.reader import Sink

Held: TypeAlias = Literal["nothing", "answer", "whole"]
"""The part of a text that is held to a client's format, in which nothing is a mark: none, all behind the reasoning, or
the whole text."""


def _never() -> bool:
    return False


class AnswerSink(Struct, frozen=True, kw_only=True):
    """Takes everything but the reasoning.

    Attributes:
        push: takes the next piece.
        reads_calls: calls are parsed in the answer, so a call may end reasoning.
        openers: marks with which calls begin.
        is_held: the answer is held to a client's format.
        is_opaque: whether the pieces so far end within a value of a call's arguments, where nothing is a mark.
    """

    push: Sink
    reads_calls: bool = False
    openers: tuple[str, ...] = ()
    is_held: bool = False
    is_opaque: Callable[[], bool] = _never
