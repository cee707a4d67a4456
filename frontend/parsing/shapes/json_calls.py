"""Calls written as JSON objects with the function's name and arguments: one object, several, or a list.

For example `<tool_call>{"name": "f", "arguments": {...}}</tool_call>` or `[{"name": ...}, ...]`.
"""

import re
from typing import Any

from quire.frontend.parsing.arguments.call_arguments import read_arguments
from quire.frontend.parsing.arguments.typed_values import conformed_arguments
from quire.frontend.parsing.event_log import EventLog
from quire.frontend.parsing.json_text import decode_string, is_object, quote, read_rest, read_text, read_value
from quire.frontend.parsing.reader import Malformed, Markers, Reader, Steps
from quire.frontend.parsing.shapes.call_shape import CallShape
from quire.frontend.parsing.shapes.call_tags import CallTag, CallTags, call_list_schema, closed_object, schema_content
from quire.frontend.parsing.tools import Tool

_ARGUMENT_KEYS = ("arguments", "parameters")
_HARMLESS_KEYS = frozenset({"type", "id"})
_NAMED = re.compile(r'\s*\[?\s*\{\s*(?:"(?:type|id)"\s*:\s*"[^"]*"\s*,\s*)*"name"\s*:\s*"([^"]*)("?)')
_STRAY = re.compile(r"[\]}\s]*")


class JsonCalls(CallShape, frozen=True, kw_only=True):
    """Calls as JSON objects.

    Attributes:
        begin: markers that open a block of calls, the model's own spelling first.
        end: markers that close a block; empty if a block ends with its JSON.
        bare: calls may appear in the text without a tag. Such a call must have a name and arguments, and no other key
            than a type and an id; any other object is content.
        listed: the model writes a list of objects, not single objects. Within a block, both are read.
        arguments_key: the model's own key for arguments. All known keys are read.
        name_key: the key of the function's name.
        number_key: the key of a number that the model gives each call, if it does.
        separator: the text between two objects that are neither in a list nor in a block with an end.
        gap: white space that the model writes inside its tags.
        typed: values get the types of the function's schema.
    """

    begin: tuple[str, ...] = ()
    end: tuple[str, ...] = ()
    bare: bool = False
    listed: bool = False
    arguments_key: str = "arguments"
    name_key: str = "name"
    number_key: str = ""
    separator: str = ""
    gap: str = ""
    typed: bool = False

    @property
    def triggers(self) -> tuple[str, ...]:
        """Markers that may begin a call."""
        return (*self.begin, "[" if self.listed else "{") if self.bare else self.begin

    @property
    def markers(self) -> tuple[str, ...]:
        """Literals of the format that may be special tokens."""
        return (*self.begin, *self.end, *([self.separator] if self.separator else []))

    @property
    def stray(self) -> tuple[str, ...]:
        """Closing markers that are not content after a call, even if nothing opened them."""
        return tuple(end for end in self.end if end.startswith("<"))

    def read(self, trigger: str, reader: Reader, log: EventLog, tools: dict[str, Tool]) -> Steps[None]:
        """Reads the calls after a trigger, which was just read."""
        calls = _Calls(reader, log, self, tools, strict=trigger not in self.begin)
        if calls.strict:
            yield from calls.read_list() if self.listed else calls.read_objects(self.separator)
        else:
            yield from self._read_block(reader, log, calls)

    def _read_block(self, reader: Reader, log: EventLog, calls: "_Calls") -> Steps[None]:
        found = False
        while True:
            char = yield from reader.space()
            if char in ("[", "{"):
                yield from reader.char()
                closed = yield from calls.read_list() if char == "[" else calls.read_objects(self.separator)
                if not closed or not self.end:
                    return
                found = True
            elif self.end and (yield from reader.accept(*self.end)):
                return
            elif not found:
                raise Malformed
            elif char in (",", ";"):
                yield from reader.char()
            else:  # extra closing brackets are dropped
                yield from reader.run(_STRAY, lambda _: None)
                return

    def begins_call(self, text: str, tools: dict[str, Tool]) -> bool:
        """True if `text`, from a trigger to the end of the answer, can only be the beginning of a call."""
        if super().begins_call(text, tools):
            return True
        named = _NAMED.match(text, len(next((each for each in self.begin if text.startswith(each)), "")))
        if named is None:
            return False
        name, closed = named.groups()
        return name in tools if closed else any(each.startswith(name) for each in tools)

    def call_tags(self, schemas: dict[str, dict[str, Any]]) -> CallTags:
        """The format around the arguments' schemas, by function."""
        begin, end = ("", "") if self.bare else (self.begin[0] + self.gap, self.gap + (*self.end, "")[0])
        if self.listed:
            content = schema_content(call_list_schema(schemas, self._call_schema))
            return CallTags(tags=[CallTag(begin, content, end)], trigger=begin.strip(), whole=True)
        return CallTags(
            tags=[
                CallTag(
                    f'{begin}{{"name": "{quote(name)}", "{self.arguments_key}": ', schema_content(schema), "}" + end
                )
                for name, schema in schemas.items()
            ],
            trigger=begin.strip() or '{"name": ',
            separator=self.separator or "\n",
        )

    def _call_schema(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        number = {self.number_key: {"type": "string", "pattern": "^[0-9]+$"}} if self.number_key else {}
        return closed_object({**number, self.name_key: {"const": name}, self.arguments_key: arguments})


class _Calls:
    """Reads call objects. A call's first event is logged as soon as its name is known and its arguments begin."""

    def __init__(self, reader: Reader, log: EventLog, form: JsonCalls, tools: dict[str, Tool], *, strict: bool) -> None:
        self._reader = reader
        self._log = log
        self._ends = Markers(form.end)
        self._name_key = form.name_key
        self._argument_keys = (*_ARGUMENT_KEYS, form.arguments_key)
        self._name = ""  # of the call that is read; empty until known
        self._offered = tools
        self._typed = form.typed
        self.strict = strict

    def read_list(self) -> Steps[bool]:
        """Reads objects with commas between them, after the opening bracket. Returns False if the block ended, too."""
        reader = self._reader
        if (yield from reader.space()) == "]" and not self.strict:
            yield from reader.char()
            return True
        while True:
            yield from reader.space()
            yield from reader.expect("{")
            if not (yield from self._read_object()):
                return False
            reader.start_record()
            yield from reader.space()
            if (yield from reader.accept(",", "]")) != ",":
                return True

    def read_objects(self, separator: str) -> Steps[bool]:
        """Reads objects with separators between them, after the first opening brace. Returns like `read_list`."""
        reader = self._reader
        while True:
            if not (yield from self._read_object()):
                return False
            if not separator:
                return True
            reader.start_record()
            yield from reader.space()
            if not (yield from reader.accept(separator)):
                return True
            yield from reader.space()
            yield from reader.expect("{")

    def _read_object(self) -> Steps[bool]:
        """Reads one call, after its opening brace. Returns False if the block or the text ended before the call."""
        self._name = ""
        try:
            return (yield from self._read_members())
        except Malformed:
            known = self._name and (not self.strict or self._name in self._offered)
            if known and self._reader.is_cut and not self._log.in_call:
                self._start()
            raise

    def _read_members(self) -> Steps[bool]:
        reader, log = self._reader, self._log
        arguments = ""  # empty until known
        while (yield from reader.space()) != "}":
            if log.in_call and (not (yield from reader.peek()) or (yield from reader.accept(*self._ends.strings))):
                log.call_ends()
                return False
            key = yield from read_text(reader)
            yield from reader.space()
            yield from reader.expect(":")
            char = yield from reader.space()
            if key == self._name_key and not self._name:
                self._name = yield from read_text(reader)
            elif key in self._argument_keys and self._name and char == "{" and not log.in_call and not self._typed:
                if not (yield from read_arguments(reader, log, self._start, self._ends)):
                    log.call_ends()
                    return False
                reader.start_record()
            elif key in self._argument_keys and not arguments and not log.in_call:
                arguments = yield from self._read_arguments()
            else:
                known = key in _HARMLESS_KEYS or log.in_call or not self.strict
                if not known or not (yield from read_value(reader, lambda _: None)):
                    raise Malformed
            yield from reader.space()
            yield from reader.accept(",")
        if not log.in_call:
            if not self._name or (self.strict and not arguments):
                raise Malformed
            self._start()
            tool = self._typed and self._offered.get(self._name)
            log.arguments(conformed_arguments(arguments or "{}", tool) if tool else arguments or "{}")
        yield from reader.char()
        log.call_ends()
        return True

    def _start(self) -> None:
        self._reader.stop_record()
        self._log.call_starts(self._name)

    def _read_arguments(self) -> Steps[str]:
        """Reads arguments that cannot be streamed: an object before the name, an object in a string, or null."""
        pieces: list[str] = []
        if not (yield from read_value(self._reader, pieces.append)):
            raise Malformed
        text = "".join(pieces)
        if text.startswith('"'):
            text = decode_string(text).strip() or "{}"
        elif text == "null":
            text = "{}"
        if not is_object(text):
            raise Malformed
        return text


class BareArguments(CallShape, frozen=True, kw_only=True):
    """The whole text is the arguments of one call: a grammar enforces this if the client names the function."""

    name: str

    @property
    def triggers(self) -> tuple[str, ...]:
        """Markers that may begin a call."""
        return ("{",)

    def read(self, trigger: str, reader: Reader, log: EventLog, tools: dict[str, Tool]) -> Steps[None]:
        """Reads the object whose opening brace was just read; later objects are content."""
        if log.num_calls:
            raise Malformed
        reader.stop_record()
        log.call_starts(self.name)
        log.arguments("{")
        yield from read_rest(reader, log.arguments)
        log.call_ends()
