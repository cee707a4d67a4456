"""Calls as a JSON list of objects with one key, the function's name: `[{"get_weather": {"city": "Paris"}}]`."""

from typing import Any

from quire.frontend.parsing.arguments.call_arguments import read_arguments
from quire.frontend.parsing.event_log import EventLog
from quire.frontend.parsing.json_text import read_text
from quire.frontend.parsing.reader import Malformed, Markers, Reader, Steps
from quire.frontend.parsing.shapes.call_shape import CallShape
from quire.frontend.parsing.shapes.call_tags import CallTag, CallTags, call_list_schema, closed_object, schema_content
from quire.frontend.parsing.tools import Tool


class KeyedCalls(CallShape, frozen=True, kw_only=True):
    """Calls as objects whose only key is the function's name, in a list between two markers."""

    begin: str
    end: str

    @property
    def triggers(self) -> tuple[str, ...]:
        """Markers that may begin a call."""
        return (self.begin,)

    @property
    def markers(self) -> tuple[str, ...]:
        """Literals of the format that may be special tokens."""
        return (self.begin, self.end)

    @property
    def stray(self) -> tuple[str, ...]:
        """Closing markers that are not content after a call, even if nothing opened them."""
        return (self.end,)

    def read(self, trigger: str, reader: Reader, log: EventLog, tools: dict[str, Tool]) -> Steps[None]:
        """Reads the list after the opening marker; a single object is read as a list of one."""
        yield from reader.space()
        listed = (yield from reader.expect("[", "{")) == "["
        if listed:
            yield from reader.space()
            yield from reader.expect("{")
        while (yield from self._read_call(reader, log)) and listed:
            reader.start_record()
            yield from reader.space()
            if (yield from reader.accept(",", "]")) != ",":
                break
            yield from reader.space()
            yield from reader.expect("{")
        reader.stop_record()
        yield from reader.space()
        yield from reader.accept(self.end)

    def _read_call(self, reader: Reader, log: EventLog) -> Steps[bool]:
        """Reads one call, after its opening brace. Returns False if the block or the text ended within the call."""
        yield from reader.space()
        name = yield from read_text(reader)
        yield from reader.space()
        if not name or not ((yield from reader.accept(":")) or reader.is_cut):
            raise Malformed
        char = yield from reader.space()
        null = yield from reader.accept("null")
        if char != "{" and not null and not reader.is_cut:
            raise Malformed

        def start() -> None:
            reader.stop_record()
            log.call_starts(name)

        complete = bool(null)
        if char == "{":
            complete = yield from read_arguments(reader, log, start, Markers((self.end,)))
        else:
            start()
        if null:
            log.arguments("{}")
        log.call_ends()
        if complete:
            yield from reader.space()
            yield from reader.accept("}")
        return complete

    def call_tags(self, schemas: dict[str, dict[str, Any]]) -> CallTags:
        """The format around the arguments' schemas, by function."""
        content = schema_content(call_list_schema(schemas, _call_schema))
        return CallTags(tags=[CallTag(self.begin, content, self.end)], trigger=self.begin, whole=True)


def _call_schema(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return closed_object({name: arguments})
