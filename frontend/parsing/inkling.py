"""Inkling's blocks: reasoning, calls and the answer are blocks of one text, each with a marker of its kind.

`<|message_model|><|content_thinking|>...<|end_message|><|message_model|><|content_text|>...<|end_message|>`; the prompt
ends with `<|message_model|>`. A function's name may stand between the two markers at the beginning of a block.
"""

import re

from msgspec import Struct

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
_NAME = re.compile(r"[\w.\-]*")


class InklingBlocks(Struct, frozen=True):
    """Inkling's blocks."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Literals of the format that may be special tokens."""
        return _MARKERS

    def is_opened(self, prompt_text: str) -> bool:
        """Whether an answer to this prompt begins within reasoning."""
        return prompt_text.rstrip().endswith(_THINKING)

    def read(self, reader: Reader, log: EventLog, content: Sink, *, opened: bool, calls: bool) -> Steps[None]:
        """Reads a whole answer: reasoning goes to the log, text and blocks of calls to `content`."""
        found = _THINKING if opened else (yield from _read_header(reader, content))
        while found:
            if found == MODEL:
                found = yield from _read_header(reader, content, marked=True)
            elif found == _THINKING:
                log.reasoning_begins()
                found = yield from reader.until(_ALL, log.reasoning, keep_tags=False)
                log.reasoning_ends()
            else:
                is_call = found == CALL and calls
                if is_call:
                    content(found)
                found = yield from reader.until(_ALL, content, keep_tags=is_call)
                if is_call and found in ENDS:
                    content(found)


def _read_header(reader: Reader, content: Sink, *, marked: bool = False) -> Steps[str]:
    """Reads the beginning of a block up to the marker of its kind, and returns the marker. Other text is content.

    Args:
        marked: a marker began the block, so a text that ends here is no content.
    """
    name = yield from reader.word(_NAME)
    found = yield from reader.accept(*_MARKERS)
    if marked and not found and reader.is_cut:
        return ""
    if found in ("", *ENDS):
        content(name)
    return found or (yield from reader.until(_ALL, content, keep_tags=False))
