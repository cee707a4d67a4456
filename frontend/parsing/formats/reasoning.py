"""Reasoning between two markers before the answer."""

import re
from typing import Protocol, Self

import msgspec
from msgspec import Struct

from quire.frontend.parsing.answer_sink import AnswerSink
from quire.frontend.parsing.event_log import EventLog, FramedText
from quire.frontend.parsing.reader import Markers, Reader, Sink, Steps
from quire.frontend.parsing.token_suffix import suffix_marks


class ReasoningShape(Protocol):
    """How a model sets its reasoning apart."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Literals of the format that may be special tokens."""

    @property
    def frames(self) -> bool:
        """True if calls stand within its marks, too."""

    def is_opened(self, prompt_text: str) -> bool:
        """True if an answer to this prompt begins within reasoning."""

    def read(self, reader: Reader, log: EventLog, answer: AnswerSink, *, opened: bool) -> Steps[None]:
        """Reads a whole text: reasoning goes to the log, everything else to `answer`."""


class ReasoningFormat(Struct, frozen=True, kw_only=True):
    """How a model marks its reasoning.

    Attributes:
        begin: markers that open reasoning. The prompt may end with one.
        end: markers that close reasoning.
        opened: answers begin within reasoning even if the prompt does not open it: the model writes no `begin`.
        anywhere: text may come before the reasoning.
        answers: pairs of markers before and after the answer that follows the reasoning, if the model writes any.
        first: texts that open reasoning too, but only as the first of the answer.
        cites: reasoning and answers name their sources, as in `<co>text</co: 0:[1]>`; the marks are dropped.
        yields_to: beginnings of calls, which end reasoning that the model forgot to close. Reasoning may mention them:
            only a bracket after them shows that there is a call.
        named: calls begin with the function's name, so a letter shows it too.
        dropped: markers that the model may write within reasoning, and before and after the answer.
        escaped_newlines: the model writes a line break as a backslash and a letter.
        suffixed: a checkpoint may have a suffix of its own in every mark.
    """

    begin: tuple[str, ...] = ("<think>",)
    end: tuple[str, ...] = ("</think>",)
    opened: bool = False
    anywhere: bool = False
    answers: tuple[tuple[str, str], ...] = ()
    first: tuple[str, ...] = ()
    cites: bool = False
    yields_to: tuple[str, ...] = ()
    named: bool = False
    dropped: tuple[str, ...] = ()
    escaped_newlines: bool = False
    suffixed: bool = False

    def with_suffix(self, suffix: str) -> Self:
        """The same format for a checkpoint whose marks end in `suffix`, if there are any such."""
        if not self.suffixed or not suffix:
            return self
        fields = {name: suffix_marks(getattr(self, name), suffix) for name in self.__struct_fields__}
        return msgspec.structs.replace(self, **fields)

    @property
    def markers(self) -> tuple[str, ...]:
        """Literals of the format that may be special tokens."""
        return self.begin + self.end + sum(self.answers, ()) + self.dropped

    @property
    def frames(self) -> bool:
        """True if calls stand within its marks, too."""
        return False

    def is_opened(self, prompt_text: str) -> bool:
        """True if an answer to this prompt begins within reasoning."""
        tail = prompt_text[-256:].rstrip()
        if tail.endswith(self.end):
            return False
        return self.opened or tail.endswith(tuple(mark.rstrip() for mark in self.begin))

    def read(self, reader: Reader, log: EventLog, answer: AnswerSink, *, opened: bool) -> Steps[None]:
        """Reads a whole text: reasoning goes to the log, everything else to `answer`.

        Args:
            opened: the text begins within reasoning.
        """
        if opened:
            log.reasoning_begins()
        reader.start_record()
        yield from reader.space()
        first = yield from reader.accept(*self.begin, *self.first, *self.end)
        leading = reader.stop_record()
        reasons = first in self.begin + self.first or (opened and not first)
        if not first:
            sink = log.reasoning if opened else answer.push
            sink(leading)
            if reader.is_at_end:
                yield from reader.until(Markers(self.begin + self.end), sink, keep_tags=False)
                return
        elif first in self.end:  # perhaps of no reasoning at all
            log.reasoning_ends()
        elif not opened:
            log.reasoning_begins()
        if self.anywhere and not first and not opened and not answer.is_held:
            if not (yield from self._read_preface(reader, answer)):
                return
            log.reasoning_begins()
            reasons = True
        if reasons:
            found = yield from self._read_reasoning(reader, log, answer)
            if not found:
                return
            log.reasoning_ends()
            if found in self.yields_to:
                answer.push(found)
        yield from self._read_answer(reader, answer)

    def _read_preface(self, reader: Reader, answer: AnswerSink) -> Steps[str]:
        """Reads text before reasoning. Returns the mark that opens the reasoning, or "" at the end of the text."""
        begins = Markers(self.begin)
        while found := (yield from reader.until(begins, answer.push, keep_tags=False)):
            if not answer.is_opaque():
                return found
            answer.push(found)
        return ""

    def _read_reasoning(self, reader: Reader, log: EventLog, answer: AnswerSink) -> Steps[str]:
        """Reads reasoning to its end; returns the marker that ends it, or "" at the end of the text."""
        ends = self._markers(self.end + (self.yields_to if answer.reads_calls else ()) + self.dropped)
        while found := (yield from self._until(reader, ends, log.reasoning)):
            if found in self.end:
                return found
            if found in self.yields_to:
                text = yield from reader.ahead(_SPACE)
                if not text.strip() or text[-1] in "{<[" or (self.named and text[-1].isalpha()):
                    return found
                log.reasoning(found)
        return ""

    def _read_answer(self, reader: Reader, answer: AnswerSink) -> Steps[None]:
        """Reads the answer, without the marks before and after it."""
        if answer.is_held:
            yield from reader.until(_NONE, answer.push)
            return
        begins = dict(self.answers)
        begun = yield from self._read_leading(reader, answer.push, begins)
        text = FramedText()

        def sink(piece: str) -> None:
            answer.push(text.push(piece) if begun else piece)

        ends = ((begins[begun],) if begun else ()) + self.dropped
        markers = self._markers(ends) if begun else Markers(ends)
        while found := (yield from self._until(reader, markers, sink)):
            closes, space = False, ""
            if not answer.is_opaque():
                closes, space = yield from reader.closes(*ends, *answer.openers)
            if not closes:
                sink(found + space)
            elif begun:
                text.cut()
        if begun:
            answer.push(text.flush())

    def _read_leading(self, reader: Reader, sink: Sink, begins: dict[str, str]) -> Steps[str]:
        """Reads the marks before an answer; returns the one of `begins`, or "" without any."""
        while True:
            reader.start_record()
            yield from reader.space()
            found = yield from reader.accept(*begins, *self.dropped)
            leading = reader.stop_record()
            if found not in self.dropped:
                break
        if not found:
            sink(leading)
            if reader.is_at_end:
                yield from reader.until(Markers((*begins, *self.dropped)), sink, keep_tags=False)
        return found

    def _markers(self, ends: tuple[str, ...]) -> Markers:
        return Markers(ends + (_CITES if self.cites else ()))

    def _until(self, reader: Reader, ends: Markers, sink: Sink) -> Steps[str]:
        """Like `Reader.until`, without the marks of citations."""
        while (found := (yield from reader.until(ends, sink, keep_tags=False))) in _CITES:
            if found == _CITE_END:
                yield from reader.until(Markers((">",)), lambda _: None, keep_partial=False)
        return found


_SPACE = re.compile(r"\s*")
_CITE_END = "</co:"
_CITES = ("<co>", _CITE_END)
_NONE = Markers(())
