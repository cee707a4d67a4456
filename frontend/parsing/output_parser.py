"""What turns one sequence's text into events, piece by piece.

`OutputParsers` is made once per server from its options; `OutputParsers.open` makes a parser for one sequence, or
says with None that its text needs none, so that plain chats pay nothing.
"""

from collections.abc import Sequence
from typing import Protocol

from quire.frontend.events import Event


class OutputParser(Protocol):
    """Parses the answer of one sequence. Never raises on any text; joined deltas do not depend on how it is cut."""

    num_tool_calls: int
    """Calls that have been started so far; with one or more, an answer that stopped finishes with "tool_calls"."""

    def push(self, text: str, token_ids: Sequence[int] = ()) -> list[Event]:
        """Takes the next piece of text; returns what is certain by now, often nothing."""

    def finish(self) -> list[Event]:
        """The rest, once, when no more text comes: text kept back, the end of an open call. No `Finish`."""
