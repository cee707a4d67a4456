"""Muse Glimmer's messages: reasoning, calls and the answer are messages to a recipient, in one text.

` to=self<|message|>...<|eom|><|start|>assistant to=user<|message|>...<|eot|>`; the prompt ends with
`<|start|>assistant`. Only messages to a function hold calls: reasoning and answers may mention them.
"""

import re

from msgspec import Struct

from quire.frontend.parsing.answer_sink import AnswerSink
from quire.frontend.parsing.event_log import EventLog
from quire.frontend.parsing.reader import Markers, Reader, Sink, Steps

_MARKERS = ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>")
_ENDS = ("<|eom|>", "<|eot|>")
_BODY_ENDS = Markers((*_MARKERS, "to="))
_NAME = re.compile(r"[\w.\-]*")
_HEADER = re.compile(r"[^<]*")


class MuseMessages(Struct, frozen=True, kw_only=True):
    """Muse's messages.

    Attributes:
        shown: the recipients whose messages are the answer; "" is a message without a recipient.
        thinks: the recipients whose messages are reasoning.
        dropped: the recipients whose messages are left out.
    """

    shown: tuple[str, ...] = ("", "user")
    thinks: tuple[str, ...] = ("self",)
    dropped: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """Literals of the format that may be special tokens."""
        return _MARKERS

    @property
    def frames(self) -> bool:
        """True if calls stand within its marks, too."""
        return True

    def is_opened(self, prompt_text: str) -> bool:
        """True if an answer to this prompt begins within reasoning."""
        return prompt_text.endswith("to=self<|message|>")

    def read(self, reader: Reader, log: EventLog, answer: AnswerSink, *, opened: bool) -> Steps[None]:
        """Reads a whole text: calls go to `answer`, and so does text without any message; all else to the log."""
        messages = _Messages(self, log, answer.push)
        found = ""
        if opened:
            messages.open("self")
        else:
            reader.start_record()
            yield from reader.space()
            space = reader.stop_record()
            found = yield from reader.accept("<|start|>", "<|message|>", "to=")
            if not found:
                answer.push(space)
        while found := found or (yield from reader.until(_BODY_ENDS, messages.write, keep_tags=False)):
            if answer.is_opaque():
                messages.write(found)
            elif found in _ENDS:
                closes, space = yield from reader.closes(*_MARKERS, "to=")
                if closes:
                    messages.close()
                else:
                    messages.write(found + space)
            else:
                yield from _read_header(found, reader, messages)
            found = ""


class _Messages:
    """Passes each message's text on. Text before the first message is content, text between two is dropped."""

    def __init__(self, form: MuseMessages, log: EventLog, content: Sink) -> None:
        self._form = form
        self._log = log
        self._content = content
        self._thinks = False
        self.is_open = False
        self.write: Sink = content

    def open(self, recipient: str) -> None:
        """Begins a message."""
        self.close()
        self.is_open = True
        self._thinks = recipient in self._form.thinks
        if self._thinks:
            self._log.reasoning_begins()
            self.write = self._log.reasoning
        elif recipient not in self._form.dropped:
            self.write = self._log.text if recipient in self._form.shown else self._content

    def close(self) -> None:
        """Ends the message, if any."""
        if self._thinks:
            self._log.reasoning_ends()
        self._thinks = self.is_open = False
        self.write = lambda _: None


def _read_header(found: str, reader: Reader, messages: _Messages) -> Steps[None]:
    """Reads a message's header, whose first marker was just read. Anything else is text."""
    if found == "<|message|>":
        if messages.is_open:
            messages.write(found)
        else:
            messages.open("")
        return
    if found == "<|start|>" and not (yield from reader.leads_to("assistant")):
        messages.write(found)
        return
    header = yield from reader.word(_NAME if found == "to=" else _HEADER)
    if (yield from reader.accept("<|message|>")):
        recipient = header if found == "to=" else header.partition("to=")[2].strip()
        messages.open(recipient)
    elif not reader.is_cut:
        messages.write(found + header)
