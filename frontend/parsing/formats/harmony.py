"""The Harmony format of gpt-oss: reasoning, calls and the answer are messages in one text, each with a header.

`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...`; the format is specified at
https://cookbook.openai.com/articles/openai-harmony. The prompt ends with `<|start|>assistant`.
"""

from typing import Any

from msgspec import Struct

from quire.frontend.parsing.arguments.call_arguments import checked_arguments
from quire.frontend.parsing.event_log import EventLog
from quire.frontend.parsing.json_text import read_rest_of_string
from quire.frontend.parsing.reader import Malformed, Markers, Reader, Sink, Steps
from quire.frontend.parsing.shapes.call_tags import CallTag, CallTags, schema_content

_MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
_HEADER_ENDS = Markers(("<|message|>", "<|start|>", "<|end|>", "<|return|>", "<|call|>"))
_BODY_ENDS = Markers(("<|start|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>"))
_BUILT_IN = ("", "assistant", "browser", "container", "python")  # recipients that are no functions
_HEADER_BEGINS = ("<|start|>", "<|channel|>", " to=")
_MESSAGE_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_FOLLOWERS = {"<|start|>": ("assistant",), "<|channel|>": ("analysis", "commentary", "final")}
"""Markers that begin a message, and the words that come next then."""


class Harmony(Struct, frozen=True):
    """The Harmony format, which includes both reasoning and calls."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Literals of the format that may be special tokens."""
        return _MARKERS

    def call_tags(self, schemas: dict[str, dict[str, Any]]) -> CallTags:
        """The format around the arguments' schemas, by function; reasoning may come first."""
        analysis = {
            "type": "tag",
            "begin": "<|channel|>analysis<|message|>",
            "content": {"type": "any_text", "excludes": ["<|start|>", "<|channel|>"]},
            "end": "<|end|><|start|>assistant",
        }
        begin = "<|channel|>commentary to=functions."
        return CallTags(
            tags=[
                CallTag(f"{begin}{name} <|constrain|>json<|message|>", schema_content(schema), "")
                for name, schema in schemas.items()
            ],
            trigger=begin,
            before={"type": "optional", "content": analysis},
            single=True,
        )


def read_harmony(reader: Reader, log: EventLog, *, calls: bool, is_held: bool = False) -> Steps[None]:
    """Reads a whole answer. Text without a header is content.

    Args:
        calls: calls are not content.
        is_held: the text is held to a client's format, unless it begins with a header.
    """
    found = yield from reader.accept(*_HEADER_BEGINS)
    if is_held and not found:
        yield from reader.until(Markers(()), log.text)
    while True:
        if found in _HEADER_BEGINS:
            found = yield from _read_message(found, reader, log, calls=calls)
        else:
            found = yield from _read_body(reader, log.text)
        if not found:
            return


def _read_message(begin: str, reader: Reader, log: EventLog, *, calls: bool) -> Steps[str]:
    """Reads one message, after its first marker. Returns the marker after it, or "" at the end of the text."""
    reader.start_record(begin)
    pieces = ["" if begin == "<|start|>" else begin]
    end = yield from reader.until(_HEADER_ENDS, pieces.append)
    raw = reader.stop_record()
    header = "".join(pieces)
    channel, recipient = _parse_header(header)
    function = _function(recipient)
    if end != "<|message|>":
        if end or not reader.is_cut or (begin == " to=" and not recipient.startswith("functions.")):
            log.text(raw.removesuffix(end))
        elif calls and function and not header.endswith(recipient):
            log.call_starts(function)
            log.call_ends()
        return end
    log.next_message()
    if function and calls:
        reader.start_record(raw)
        end = yield from _read_call(function, reader, log)
    elif recipient and not calls:
        log.text(raw)
        end = yield from _read_body(reader, log.text)
    elif channel == "analysis" or recipient:
        log.reasoning_begins()
        end = yield from _read_body(reader, log.reasoning)
        log.reasoning_ends()
    else:
        end = yield from _read_body(reader, log.text)
    return end


def _read_body(reader: Reader, sink: Sink) -> Steps[str]:
    """Passes on a message's text. Returns the marker that ends it; a marker that begins or ends nothing is text."""
    while found := (yield from reader.until(_BODY_ENDS, sink, keep_tags=False)):
        space = ""
        if found in _FOLLOWERS:
            ends = yield from reader.leads_to(*_FOLLOWERS[found])
        else:
            ends, space = yield from reader.closes("<|start|>", "<|channel|>", *_MESSAGE_ENDS)
        if ends:
            return found
        sink(found + space)
    return ""


def _read_call(function: str, reader: Reader, log: EventLog) -> Steps[str]:
    """Reads a call's arguments. Returns the marker that ends them. Arguments that are no JSON are text, with the header
    that the reader's record begins with."""

    def start() -> None:
        reader.stop_record()
        log.call_starts(function)

    first = yield from reader.space()
    if first == "{":
        arguments = checked_arguments(log, start)
        end = yield from _read_object(reader, arguments.push)
        if end:
            arguments.close()
        raw = reader.stop_record()
        if not log.in_call and not arguments.is_broken and not end and reader.is_interrupted:
            start()
        elif not log.in_call:
            log.text(raw.removesuffix(end))
    else:
        start()
        end = yield from reader.until(_BODY_ENDS, log.arguments, keep_partial=False)
        if first in ("", "<"):
            log.arguments("{}")
    log.call_ends()
    return end


def _read_object(reader: Reader, sink: Sink) -> Steps[str]:
    """Passes on an object. Returns the marker that ends it; within its strings, nothing is a marker."""
    markers = Markers((*_BODY_ENDS.strings, '"'))
    while (found := (yield from reader.until(markers, sink, keep_partial=False))) == '"':
        sink(found)
        try:
            yield from read_rest_of_string(reader, sink)
        except Malformed:
            return ""
    return found


def _function(recipient: str) -> str:
    """The function that a message calls; empty if its recipient is none. The prefix may be missing."""
    name = recipient.removeprefix("functions.")
    return "" if name == recipient and recipient.partition(".")[0] in _BUILT_IN else name


def _parse_header(header: str) -> tuple[str, str]:
    """Channel and recipient of a message; each is empty if the header has none."""
    channel = recipient = ""
    for part in header.replace("<|channel|>", " <|channel|>").replace("<|constrain|>", " ").split():
        if part.startswith("<|channel|>"):
            channel = part.removeprefix("<|channel|>")
        elif part.startswith("to="):
            recipient = part.removeprefix("to=")
    return channel, recipient
