"""Inkling's blocks: reasoning, calls and the answer are blocks of one text, each with a marker of its kind.

`<|message_model|><|content_thinking|>...<|end_message|><|message_model|><|content_text|>...<|end_message|>`; the prompt
ends with `<|message_model|>`. A function's name may stand between the two markers at the beginning of a block.
"""

import re

from msgspec import Struct

from quire.frontend.parsing.answer_sink import AnswerSink
from quire.frontend.parsing.event_log import EventLog
from quire.frontend.parsing.reader import Markers, Reader, Sink, Steps

MODEL = "<|message_model|>"
CALL = "<|content_invoke_tool_json|>"
ENDS = ("<|end_message|>", "<|content_model_end_sampling|>")
_THINKING = "<|content_thinking|>"
_TEXTS = ("<|content_text|>", "<|content_invoke_tool_text|>", "<|content_tool_error|>")
_KINDS = (*_TEXTS, _THINKING, CALL)
_MARKERS = (MODEL, *_KINDS, *ENDS)
_ALL = Markers(_MARKERS)
_TEXT_ENDS = Markers((MODEL, *ENDS))
_NAME = re.compile(r"[\w.\-]*")


class InklingBlocks(Struct, frozen=True):
    """Inkling's blocks."""

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
        return prompt_text.rstrip().endswith(_THINKING)

    def read(self, reader: Reader, log: EventLog, answer: AnswerSink, *, opened: bool) -> Steps[None]:
        """Reads a whole text: reasoning goes to the log, text and blocks of calls to `answer`."""
        found = _THINKING if opened else (yield from _read_header(reader, answer.push))
        while found:
            if found == MODEL:
                found = yield from _read_header(reader, answer.push, marked=True)
            elif found == _THINKING:
                log.reasoning_begins()
                found = yield from reader.until(_ALL, log.reasoning, keep_tags=False)
                log.reasoning_ends()
            elif found == CALL and answer.reads_calls:
                found = yield from _read_call(reader, answer)
            else:
                found = yield from _read_text(reader, answer.push)


def _read_call(reader: Reader, answer: AnswerSink) -> Steps[str]:
    """Passes on a call after its marker, and its end. Returns the marker that ends it."""
    answer.push(CALL)
    while (found := (yield from reader.until(_ALL, answer.push))) and answer.is_opaque():
        answer.push(found)
    if found in ENDS:
        answer.push(found)
    return found


def _read_text(reader: Reader, content: Sink) -> Steps[str]:
    """Passes on text, in which other marks than those of its end are text, too. Returns the marker that ends it."""
    while found := (yield from reader.until(_TEXT_ENDS, content, keep_tags=False)):
        space = ""
        if found == MODEL:
            name = _NAME.match((yield from reader.ahead(_NAME)))[0]  # type: ignore[index]  # matches always
            closes = yield from reader.leads_to(*(name + kind for kind in _KINDS))
        else:
            closes, space = yield from reader.closes(MODEL, *ENDS)
        if closes:
            return found
        content(found + space)
    return ""


def _read_header(reader: Reader, content: Sink, *, marked: bool = False) -> Steps[str]:
    """Reads the beginning of a block up to the marker of its kind, and returns the marker. Other text is content.

    Args:
        marked: a marker began the block, so a text that is cut here is no content.
    """
    name = yield from reader.word(_NAME)
    found = yield from reader.accept(*_MARKERS)
    if marked and not found and reader.is_cut:
        return ""
    if found in ("", *ENDS):
        content((MODEL if marked and not found else "") + name)
    if not found and reader.is_at_end:  # perhaps within a marker
        return (yield from reader.until(_ALL, content, keep_tags=False))
    return found or (yield from _read_text(reader, content))
