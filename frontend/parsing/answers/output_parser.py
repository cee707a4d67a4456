"""Turns one sequence's text into events, piece by piece: reasoning is split off first, then calls."""

import re
from collections.abc import Sequence
from typing import Protocol

from quire.frontend.parsing.event_log import EventLog
from quire.frontend.parsing.events import Event, ToolCallEnd
from quire.frontend.parsing.reader import Malformed, Markers, Reader, Sink, Steps, TextEnd
from quire.frontend.parsing.shapes.call_shape import CallShape
from quire.frontend.parsing.tools import Tool

_SPACE = re.compile(r"\s*")


class OutputParser(Protocol):
    """Parses the answer of one sequence. Never raises. Joined deltas do not depend on the text's cuts."""

    @property
    def num_tool_calls(self) -> int:
        """Number of calls so far. With one or more, an answer that stopped has the finish reason "tool_calls"."""

    @property
    def is_complete(self) -> bool:
        """True if the answer has as many calls as are allowed; later text makes no events."""

    @property
    def ends_within_call(self) -> bool:
        """True if the answer ended before the arguments of its last call did."""

    def push(self, text: str, token_ids: Sequence[int] = ()) -> list[Event]:
        """Takes the next piece of text; returns the events that are certain by now, often none."""

    def finish(self, by: TextEnd = "model") -> list[Event]:
        """Ends the text, once: returns the text that was held back and the end of an open call, but no `Finish`.

        The beginning of a mark is text, unless a limit cut the text there.
        """


class TextFilter(Protocol):
    """Takes text, and writes events to a log or passes text on."""

    def push(self, text: str) -> None:
        """Takes the next piece of text."""

    def finish(self, by: TextEnd) -> None:
        """Ends the text."""


class Machine:
    """A filter that runs a parser's steps."""

    def __init__(self, reader: Reader, steps: Steps[None]) -> None:
        self._reader = reader
        self._steps: Steps[None] | None = steps

    def push(self, text: str) -> None:
        """Takes the next piece of text."""
        self._reader.feed(text)
        self._resume()

    def finish(self, by: TextEnd) -> None:
        """Ends the text."""
        self._reader.end(by)
        self._resume()

    def _resume(self) -> None:
        if self._steps is not None and next(self._steps, self) is self:
            self._steps = None


class EventParser:
    """An `OutputParser` of one or two filters that write to one log.

    Args:
        filters: in the order in which text passes through them. The first filter feeds the second.
        max_calls: the number of calls after which no event is returned; None for no limit.
    """

    def __init__(self, log: EventLog, filters: Sequence[TextFilter], *, max_calls: int | None) -> None:
        self._log = log
        self._filters = filters
        self._max_calls = max_calls
        self._is_complete = False

    @property
    def num_tool_calls(self) -> int:
        """Number of calls so far."""
        return self._log.num_calls if self._max_calls is None else min(self._log.num_calls, self._max_calls)

    @property
    def is_complete(self) -> bool:
        """True if the answer has as many calls as are allowed; later text makes no events."""
        return self._is_complete

    @property
    def ends_within_call(self) -> bool:
        """True if the answer ended before the arguments of its last call did."""
        return self._log.ends_within_call and not self._is_complete

    def push(self, text: str, token_ids: Sequence[int] = ()) -> list[Event]:
        """Takes the next piece of text."""
        if text:
            self._filters[0].push(text)
        return self._drain()

    def finish(self, by: TextEnd = "model") -> list[Event]:
        """Ends the text, once; returns the last events."""
        self._log.text_ends()
        for text_filter in self._filters:
            text_filter.finish(by)
        self._log.finish()
        return self._drain()

    def _drain(self) -> list[Event]:
        events = self._log.drain()
        return [event for event in events if self._is_wanted(event)] if self._max_calls is not None else events

    def _is_wanted(self, event: Event) -> bool:
        if self._is_complete:
            return False
        if isinstance(event, ToolCallEnd) and self._max_calls is not None:
            self._is_complete = event.index + 1 >= self._max_calls
        return True


class Fork:
    """A filter in front of others, for a text that keeps to a client's format or begins with a mark of theirs."""

    def __init__(self, openers: tuple[str, ...], next_filter: Sink, text: Sink) -> None:
        self._openers = openers
        self._next_filter = next_filter
        self._text = text
        self._held = ""
        self._sink: Sink | None = None

    def push(self, text: str) -> None:
        """Takes the next piece of text."""
        if self._sink is not None:
            self._sink(text)
            return
        self._held += text
        body = self._held.lstrip()
        if body.startswith(self._openers):
            self._decide(self._next_filter)
        elif body and not any(opener.startswith(body) for opener in self._openers):
            self._decide(self._text)

    def finish(self, by: TextEnd) -> None:
        """Ends the text; the other filters are ended for themselves."""
        if self._sink is None:
            self._decide(self._text)

    def _decide(self, sink: Sink) -> None:
        self._sink = sink
        sink(self._held)


def read_calls(
    reader: Reader, log: EventLog, form: CallShape, tools: Sequence[Tool], *, is_held: bool = False
) -> Steps[None]:
    """Reads a whole text: calls in the format `form`, and everything else as content.

    Args:
        is_held: the text is held to a client's format, unless it begins with a call.
    """
    by_name = {tool.name: tool for tool in tools}
    text = _Text(log)
    if is_held:
        text.push((yield from reader.word(_SPACE)))
        found = yield from reader.accept(*form.triggers)
        if not found or not (yield from _read_call(found, reader, log, form, by_name)):
            yield from reader.until(Markers(()), log.text)
            return
        text.after_call = True
    markers = Markers((*form.triggers, *form.stray))
    while found := (yield from reader.until(markers, text.push, keep_tags=False)):
        if found not in form.triggers:
            yield from _read_closing_mark(found, reader, form, text)
            continue
        num_calls = log.num_calls
        whole = yield from _read_call(found, reader, log, form, by_name)
        if whole and reader.is_cut:
            return
        text.after_call = log.num_calls > num_calls
        text.in_block = text.after_call and not whole


class _Text:
    """Content.

    Attributes:
        after_call: only white space has come since a call.
        in_block: the mark that closes a block of calls is still to come, some of which were none.
    """

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self.after_call = False
        self.in_block = False

    def push(self, text: str) -> None:
        if text.strip():
            self.after_call = False
        self._log.text(text)


def _read_call(trigger: str, reader: Reader, log: EventLog, form: CallShape, tools: dict[str, Tool]) -> Steps[bool]:
    """Reads calls after a trigger. False if there are none, or not only calls, so that some of the text is content."""
    reader.start_record(trigger)
    try:
        yield from form.read(trigger, reader, log, tools)
    except Malformed:
        log.call_ends()
        text = reader.stop_record()
        if not (reader.is_cut and (log.num_calls or form.begins_call(text, tools))):
            log.text(text)
            return False
    reader.stop_record()
    return True


def _read_closing_mark(found: str, reader: Reader, form: CallShape, text: _Text) -> Steps[None]:
    """Drops a mark that closes a call, or the answer; anywhere else it is text."""
    if text.after_call or text.in_block:
        text.in_block = False
        return
    if found in form.dropped:
        tags = (trigger for trigger in form.triggers if trigger[1:])
        closes, space = yield from reader.closes(*tags, *form.stray)
        if closes:
            return
        found += space
    text.push(found)
