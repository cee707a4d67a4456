"""Calls with the function's name outside of the arguments' JSON: `<begin>name<separator>{...}<end>`."""

import re
from collections.abc import Callable
from typing import Any

from quire.frontend.parsing.arguments.call_arguments import read_arguments, read_literal_arguments
from quire.frontend.parsing.arguments.typed_values import ValueSchema
from quire.frontend.parsing.event_log import EventLog
from quire.frontend.parsing.json_text import read_value
from quire.frontend.parsing.literals import Notation
from quire.frontend.parsing.reader import Malformed, Markers, Reader, Steps
from quire.frontend.parsing.shapes.call_shape import CallShape
from quire.frontend.parsing.shapes.call_tags import ANY_OBJECT, CallTag, CallTags, schema_content
from quire.frontend.parsing.shapes.json_calls import JsonCalls
from quire.frontend.parsing.shapes.value_tags import Literals
from quire.frontend.parsing.tools import Tool

_NAME = re.compile(r"[\w.:/\-]*")
_INDEXED = re.compile(r"((?:functions\.)?([^:]+)(?::.*)?:[0-9]+)")
_CALL_ID = re.compile(r"[\w\-]*")


class NamedCalls(CallShape, frozen=True, kw_only=True):
    """Calls whose name precedes the arguments.

    Attributes:
        section: markers that open and close a group of calls, if the model has groups.
        call_begin: the marker that opens a call.
        prefix: the text between `call_begin` and the name; the model may leave it out up to `prefix_end`.
        name_end: the marker that ends the name; it may be missing if `name_end_optional`.
        call_id: the marker before the call's id, which the model may write between the name and `name_end`.
        arguments_end: the text right after the arguments.
        call_end: the marker that closes a call.
        separator: the text between two calls.
        notation: how arguments are written, if not as JSON.
        indexed: the name is `functions.NAME:INDEX`, which is also the call's id. A call without an index is dropped.
        older: another format that the same `call_begin` may open.
    """

    call_begin: str
    section: tuple[str, str] | None = None
    prefix: str = ""
    prefix_end: str = ""
    name_end: str = ""
    name_end_optional: bool = False
    call_id: str = ""
    arguments_end: str = ""
    call_end: str = ""
    separator: str = ""
    notation: Notation | None = None
    indexed: bool = False
    older: JsonCalls | None = None

    @property
    def triggers(self) -> tuple[str, ...]:
        """Markers that may begin a call."""
        return (self.section[0], self.call_begin) if self.section else (self.call_begin,)

    @property
    def markers(self) -> tuple[str, ...]:
        """Literals of the format that may be special tokens."""
        every = (*(self.section or ()), self.call_begin, self.prefix, self.name_end, self.call_id)
        every += (self.arguments_end, self.call_end)
        return tuple(marker for marker in every if marker) + (self.notation.quotes if self.notation else ())

    @property
    def stray(self) -> tuple[str, ...]:
        """Closing markers that are not content after a call, even if nothing opened them."""
        return tuple(end for end in (self.section[1] if self.section else "", self.call_end, *self.dropped) if end)

    def read(self, trigger: str, reader: Reader, log: EventLog, tools: dict[str, Tool]) -> Steps[None]:
        """Reads the calls after a trigger, which was just read."""
        section = self.section
        if section is None or trigger == self.call_begin:
            if self.older and (yield from reader.space()) in ("[", "{"):
                yield from self.older.read(trigger, reader, log, tools)
                return
            yield from self._read_call(reader, log, tools)
            if section is None:
                return
        begin, end = self.call_begin, section[1]
        while True:
            yield from reader.space()
            found = yield from reader.accept(begin, end)
            if not found and trigger == begin:
                return
            if not found:
                raise Malformed
            if found == end:
                return
            if trigger == begin:
                reader.start_record(found)
            yield from self._read_call(reader, log, tools)
            trigger = begin

    def _read_call(self, reader: Reader, log: EventLog, tools: dict[str, Tool]) -> Steps[None]:
        """Reads one call, after `call_begin`."""
        yield from reader.space()
        if self.prefix:
            yield from reader.expect(self.prefix, *((self.prefix_end,) if self.prefix_end else ()))
        name = yield from reader.word(_NAME)
        call_id = None
        if self.call_id and (yield from reader.accept(self.call_id)):
            call_id = yield from reader.word(_CALL_ID)
        closed = self.name_end and (yield from reader.accept(self.name_end))
        if self.name_end and not closed:
            yield from reader.space()
            closed = yield from reader.accept(self.name_end.lstrip())
            if not closed and not self.name_end_optional:
                raise Malformed
        if self.indexed and name:
            match = _INDEXED.match(name)
            if match is None:
                yield from self._drop_call(reader)
                return
            call_id, name = match.groups()
        char = yield from reader.space()
        if not name or (char != "{" and not (closed and reader.is_cut)):
            raise Malformed

        def start() -> None:
            reader.stop_record()
            log.call_starts(name, call_id)

        if char:
            yield from self._read_arguments(reader, log, start, tools.get(name))
        else:
            start()
        log.call_ends()

    def _drop_call(self, reader: Reader) -> Steps[None]:
        """Drops the rest of a call."""
        reader.stop_record()
        yield from reader.space()
        yield from read_value(reader, lambda _: None, Markers((self.call_end,)))
        yield from reader.space()
        yield from reader.accept(self.call_end)

    def _read_arguments(
        self, reader: Reader, log: EventLog, start: Callable[[], None], tool: Tool | None
    ) -> Steps[None]:
        """Reads the arguments, which `start` the call, and the end of the call."""
        end = Markers((self.call_end,) if self.call_end else ())
        if self.notation:
            yield from read_literal_arguments(reader, log, start, self.notation, ValueSchema.of(tool))
        elif not (yield from read_arguments(reader, log, start, end)):
            return
        log.call_ends()
        if self.arguments_end and (yield from reader.space()):
            yield from reader.accept(self.arguments_end.strip())
        if self.call_end:
            yield from reader.space()
            yield from reader.accept(self.call_end)

    def call_tags(self, schemas: dict[str, dict[str, Any]]) -> CallTags | None:
        """The format around the arguments' schemas, by function; None if no grammar can describe the format."""
        contents = {name: self._content(schema) for name, schema in schemas.items()}
        if not all(contents.values()):
            return None
        return CallTags(
            tags=[self._call_tag(name, content) for name, content in contents.items() if content],
            trigger=self.triggers[0],
            separator=self.separator,
            section=self.section,
        )

    def _content(self, schema: dict[str, Any]) -> dict[str, Any] | None:
        if self.notation is None:
            return schema_content(schema)
        if schema == ANY_OBJECT:
            return {"type": "any_text"}
        return Literals(self.notation, schema).write({"type": "object", **schema})

    def _call_tag(self, name: str, content: dict[str, Any]) -> CallTag:
        begin, end = f"{self.call_begin}{self.prefix}", f"{self.arguments_end}{self.call_end}"
        if not self.indexed:
            return CallTag(f"{begin}{name}{self.name_end}", content, end)
        index = {"type": "regex", "pattern": "[0-9]{1,3}"}
        after = {"type": "const_string", "value": self.name_end}
        return CallTag(f"{begin}functions.{name}:", {"type": "sequence", "elements": [index, after, content]}, end)
