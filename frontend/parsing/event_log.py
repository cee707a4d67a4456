"""Collects events: joins deltas, counts calls, and drops the white space around calls and reasoning."""

from collections.abc import Callable

from quire.frontend.parsing.call_ids import random_call_id
from quire.frontend.parsing.events import (
    Event,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from quire.frontend.parsing.json_text import is_object


class EventLog:
    """The events of one sequence, in order; `drain` returns each event once.

    White space before, between and after calls, and around reasoning, belongs to the format and not to the answer. So
    white space is held back until other text follows.

    Args:
        make_call_id: makes the id of a call whose format has none.
        calls_only: the answer consists of calls: text is what is left of one that was cut short, and is dropped.
    """

    def __init__(self, make_call_id: Callable[[], str] = random_call_id, *, calls_only: bool = False) -> None:
        self.num_calls = 0
        self.in_call = False
        self.ends_within_call = False
        self._text_ended = False
        self._arguments: list[str] = []  # of the open call
        self._make_call_id = make_call_id
        self._calls_only = calls_only
        self._events: list[Event] = []
        self._pending: list[str] = []
        self._pending_kind: type[TextDelta] | type[ReasoningDelta] | type[ToolCallArguments] = TextDelta
        self._text = FramedText()
        self._reasoning = FramedText()

    def drain(self) -> list[Event]:
        """The events since the last `drain`."""
        self._flush()
        events, self._events = self._events, []
        return events

    def text(self, text: str) -> None:
        """Adds content."""
        if not self._calls_only:
            self._add(TextDelta, self._text.push(text))

    def reasoning(self, text: str) -> None:
        """Adds reasoning."""
        self._add(ReasoningDelta, self._reasoning.push(text))

    def reasoning_begins(self) -> None:
        """Notes that a block of reasoning was opened."""
        self._text.cut()
        self._reasoning.cut()

    def reasoning_ends(self) -> None:
        """Notes that a block of reasoning was closed."""
        self._reasoning.cut()
        self._text.cut()

    def next_message(self) -> None:
        """Notes that another message begins: its content starts on a new line."""
        for text in (self._text, self._reasoning):
            text.new_line()

    def call_starts(self, name: str, call_id: str | None = None) -> None:
        """Begins a call of the function `name`."""
        self._text.cut()
        self._flush()
        self._events.append(ToolCallStart(self.num_calls, call_id or self._make_call_id(), name))
        self.num_calls += 1
        self.in_call = True
        self._arguments.clear()

    def arguments(self, text: str) -> None:
        """Adds to the open call's arguments."""
        self._arguments.append(text)
        self._add(ToolCallArguments, text)

    def call_ends(self) -> None:
        """Ends the open call, if any."""
        if self.in_call:
            self._flush()
            self.ends_within_call = self._text_ended and not _are_whole("".join(self._arguments))
            self._events.append(ToolCallEnd(self.num_calls - 1, self._text_ended, self.ends_within_call))
            self.in_call = False

    def text_ends(self) -> None:
        """Notes that the text has ended: a call that is still open was cut."""
        self._text_ended = True

    def finish(self) -> None:
        """Ends the events: closes the open call, and adds the white space that was held back."""
        self.call_ends()
        self._add(ReasoningDelta, self._reasoning.flush())
        self._add(TextDelta, self._text.flush())

    def _add(self, kind: type[TextDelta] | type[ReasoningDelta] | type[ToolCallArguments], text: str) -> None:
        if not text:
            return
        if kind is not self._pending_kind:
            self._flush()
            self._pending_kind = kind
        self._pending.append(text)

    def _flush(self) -> None:
        if not self._pending:
            return
        text = "".join(self._pending)
        self._pending.clear()
        if self._pending_kind is ToolCallArguments:
            self._events.append(ToolCallArguments(self.num_calls - 1, text))
        elif self._pending_kind is ReasoningDelta:
            self._events.append(ReasoningDelta(text))
        else:
            self._events.append(TextDelta(text))


def _are_whole(arguments: str) -> bool:
    """True if no end is missing: arguments are an object in JSON, or the text of a custom tool."""
    text = arguments.strip()
    return bool(text) and (not text.startswith("{") or is_object(text))


class FramedText:
    """Text without the white space at its cuts. If text continues after a cut, one side's white space separates it."""

    def __init__(self) -> None:
        self._held: list[str] = []  # white space at the end, which may come before a cut
        self._gap: list[str] = []  # white space at the cut
        self._gap_is_before = False
        self._after_cut = False
        self._any = False

    def push(self, text: str) -> str:
        """Adds text; returns the held white space and the new text, without the white space at its end."""
        if self._after_cut:
            text = self._pass_cut(text)
        body = text.rstrip()
        if not body:
            if text:
                self._held.append(text)
            return ""
        self._any = True
        if len(body) == len(text) and not self._held:
            return text
        whole = "".join(self._held) + body
        self._held = [text[len(body) :]]
        return whole

    def cut(self) -> None:
        """Marks a cut: the white space here is dropped, unless more text follows."""
        if not self._after_cut:
            self._gap, self._held = self._held, []
            self._gap_is_before = any(self._gap)
        self._after_cut = True

    def new_line(self) -> None:
        """Marks a cut after which text continues on a new line."""
        self.cut()
        if self._any:
            self._gap, self._gap_is_before = ["\n"], True

    def flush(self) -> str:
        """Returns the white space that is held, which ends the text."""
        text = "".join(self._held)
        self._held.clear()
        return text

    def _pass_cut(self, text: str) -> str:
        """`text` after a cut: empty as long as it is white space; the first other text gets the gap before it."""
        body = text.lstrip()
        if not self._gap_is_before:
            self._gap.append(text[: len(text) - len(body)])
        if not body:
            return ""
        self._after_cut = False
        return "".join(self._gap) + body if self._any else body
