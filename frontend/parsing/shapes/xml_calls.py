"""Calls with a tag around each argument, such as `<function=f><parameter=a>1</parameter></function>`.

Values are text; the function's schema gives their types. Strings are passed on as they arrive, other values when
complete.
"""

import functools
import re
from collections.abc import Callable
from typing import Any, Self, TypeAlias

import msgspec

from quire.frontend.parsing.arguments.call_arguments import read_arguments
from quire.frontend.parsing.arguments.typed_values import (
    argument_types,
    json_argument,
    schema_types,
    to_json,
    unwrapped,
    wraps_arguments,
)
from quire.frontend.parsing.event_log import EventLog
from quire.frontend.parsing.json_text import quote
from quire.frontend.parsing.reader import Malformed, Markers, Reader, Sink, Steps
from quire.frontend.parsing.shapes.call_shape import CallShape
from quire.frontend.parsing.shapes.call_tags import CallTag, CallTags, schema_content
from quire.frontend.parsing.shapes.json_calls import JsonCalls
from quire.frontend.parsing.shapes.trimmed_text import TrimmedText
from quire.frontend.parsing.shapes.value_tags import Arguments, constant, optional, raw_text, sequence, tag
from quire.frontend.parsing.token_suffix import suffix_marks
from quire.frontend.parsing.tools import Tool

Convert: TypeAlias = Callable[[str], str]

_NAME = re.compile(r"[\w.:/\-]*")
_KEY = re.compile(r"[^<>\"'\n]*")
_STRING = frozenset({"string"})


class XmlCalls(CallShape, frozen=True, kw_only=True):
    """Calls with tagged arguments.

    Attributes:
        section: markers that open and close a group of calls, if the model has groups.
        call_begin, name_end: markers before and after the function's name. Without `name_end`, the name ends at the
            first character that a name cannot have.
        call_end: the marker that closes a call.
        wrapper: markers before and after a single call within the section.
        key_begin, key_ends: markers before and after an argument's name. Each end maps to how the model wrote the
            value: as "string" or as "json", or "" if the function's schema decides.
        wrappers: names of an argument in which the model may wrap all others.
        misspelt: other ways in which the model writes the beginning of a section.
        value_begin: the marker before the value, if the key's end is not enough.
        value_end: the marker that closes a value.
        unclosed: the next argument or the call's end also ends a value, because some models forget to close it.
        trim: white space around strings that belongs to the format: "newline" (one on each side), "space" or "".
        grouped: one section contains all calls; otherwise each call has its own section.
        gap: white space that the model writes between tags.
        type: markers before and after a value's type, which the model may write before the value.
        json: the format of a call that is written as a JSON object instead.
        style: XGrammar's name for this notation of arguments, if there is one.
        older: another format that a section may hold.
        suffixed: a checkpoint may have a suffix of its own in every mark, which XGrammar's notation lacks.
    """

    call_begin: str
    call_end: str
    key_begin: str
    key_ends: dict[str, str]
    value_end: str
    name_end: str = ""
    section: tuple[str, str] | None = None
    wrapper: tuple[str, str] = ("", "")
    value_begin: str = ""
    wrappers: tuple[str, ...] = ()
    misspelt: tuple[str, ...] = ()
    unclosed: bool = False
    trim: str = ""
    grouped: bool = False
    gap: str = ""
    type: tuple[str, str] | None = None
    json: JsonCalls | None = None
    style: str = ""
    older: JsonCalls | None = None
    suffixed: bool = False

    def with_suffix(self, suffix: str) -> Self:
        """The same format for a checkpoint whose marks end in `suffix`, if there are any such."""
        if not self.suffixed or not suffix:
            return self
        fields = {name: suffix_marks(getattr(self, name), suffix) for name in self.__struct_fields__}
        return msgspec.structs.replace(self, **{**fields, "style": ""})

    @property
    def triggers(self) -> tuple[str, ...]:
        """Markers that may begin a call."""
        return (self.section[0], self.call_begin, *self.misspelt) if self.section else (self.call_begin,)

    @property
    def markers(self) -> tuple[str, ...]:
        """Literals of the format that may be special tokens."""
        every = (*(self.section or ()), self.call_begin, self.name_end, self.call_end, self.key_begin, *self.key_ends)
        every += self.type or ()
        every += (self.value_begin, self.value_end, *re.split(r"\w+(?=<)", self.wrapper[0]), self.wrapper[1])
        return tuple(marker for marker in every if marker)

    @property
    def stray(self) -> tuple[str, ...]:
        """Closing markers that are not content after a call, even if nothing opened them."""
        every = (self.section[1] if self.section else "", self.wrapper[1], self.call_end)
        return tuple(end for end in every if end) + tuple(begin.replace("<", "</", 1) for begin in self.misspelt)

    def read(self, trigger: str, reader: Reader, log: EventLog, tools: dict[str, Tool]) -> Steps[None]:
        """Reads the calls after a trigger, which was just read."""
        before, after = self.wrapper
        if trigger == self.call_begin:
            yield from self._read_calls(reader, log, tools)
        if not self.section:
            return
        if self.older and trigger == self.section[0] and (yield from reader.space()) in ("[", "{"):
            yield from self.older.read(trigger, reader, log, tools)
            return
        while True:
            first = trigger != self.call_begin
            yield from reader.space()
            if not first and after and (yield from reader.accept(after)):
                yield from reader.space()
            if before and (yield from reader.accept(before)):
                yield from reader.space()
            found = yield from reader.accept(self.call_begin, self.section[1])
            if not found and first:
                raise Malformed
            if found != self.call_begin:
                return
            if not first:
                reader.start_record(found)
            yield from self._read_calls(reader, log, tools)
            trigger = self.call_begin

    def _read_calls(self, reader: Reader, log: EventLog, tools: dict[str, Tool]) -> Steps[None]:
        """Reads a call after its opening marker, and those whose openers ended the one before."""
        while (yield from _Call(self, reader, log, tools).read()):
            reader.start_record(self.call_begin)

    def call_tags(self, schemas: dict[str, dict[str, Any]]) -> CallTags | None:
        """The format around the arguments' schemas, by function; None if no grammar can describe the format."""
        contents = {name: self._content(schema) for name, schema in schemas.items()}
        if not all(contents.values()):
            return None
        section_begin, section_end = self.section or ("", "")
        before = "" if self.grouped else section_begin + self.gap if section_begin else ""
        after = "" if self.grouped else self.gap + section_end if section_end else ""
        return CallTags(
            tags=[
                CallTag(
                    f"{before}{self.wrapper[0]}{self.call_begin}{name}{self.name_end}{self.gap}",
                    content,
                    f"{self.gap}{self.call_end}{self.wrapper[1]}{after}",
                )
                for name, content in contents.items()
                if content
            ],
            trigger=self.triggers[0],
            separator=self.gap if self.grouped else "\n",
            section=(section_begin + self.gap, self.gap + section_end) if self.grouped else None,
        )

    def _content(self, schema: dict[str, Any]) -> dict[str, Any] | None:
        """The arguments of a call of a function with this schema."""
        if self.style:
            return schema_content(schema, self.style)
        key_end = next(iter(self.key_ends))
        key = {"type": "regex", "pattern": "[^<>\"'\\n]+"}
        value = tag(key_end + self.value_begin, {"type": "any_text"}, self.value_end)
        others = tag(self.key_begin, sequence(key, value), "")

        def argument(name: str, value: Any) -> dict[str, Any] | None:
            text = raw_text(value, schema, self.value_end)
            if text is None or not _KEY.fullmatch(name):
                return None
            [kind, *more] = (*schema_types(value, schema), "")
            typed = self.type and kind and not more[1:]
            written = optional(constant(f"{self.type[0]}{kind}{self.type[1]}")) if self.type and typed else None
            begin = constant(self.value_begin) if self.value_begin else None
            return sequence(constant(f"{self.key_begin}{name}{key_end}"), written, begin, text)

        return Arguments(self.gap, others={"type": "star", "content": others}).write(schema, argument)


class _Call:
    """Reads one call, after its opening marker."""

    def __init__(self, form: XmlCalls, reader: Reader, log: EventLog, tools: dict[str, Tool]) -> None:
        self._form = form
        self._reader = reader
        self._log = log
        self._tools = tools
        self._junk: list[str] = []  # text between arguments
        self._keys: set[str] = set()

    def read(self) -> Steps[bool]:
        """Reads the call. Returns whether the opening marker of another one ended it."""
        form, reader, log = self._form, self._reader, self._log
        if (yield from reader.space()) == "{" and form.json:
            yield from form.json.read(form.call_begin, reader, log, self._tools)
            return False
        name = yield from reader.word(_NAME)
        if form.name_end:
            yield from reader.expect(form.name_end)
        char = yield from reader.space()
        if not name:
            raise Malformed
        if not form.name_end:  # only a following marker shows that the word is a name
            found = yield from reader.expect(form.key_begin, form.call_end)
        elif char == "{":
            yield from self._read_json(name)
            return False
        else:
            found = yield from reader.accept(form.key_begin, form.call_end)
        reader.stop_record()
        log.call_starts(name)
        marker = yield from self._read_arguments(name, found)
        log.call_ends()
        if junk := "".join(self._junk).strip():
            log.text(junk)
        return marker == form.call_begin

    def _read_json(self, name: str) -> Steps[None]:
        """Reads arguments as one JSON object, which some models write instead of tags."""
        form, log = self._form, self._log

        def start() -> None:
            self._reader.stop_record()
            log.call_starts(name)

        end = Markers((form.call_end,))
        if (yield from read_arguments(self._reader, log, start, end)):
            log.call_ends()
            yield from self._reader.until(end, log.text, keep_tags=False)
        log.call_ends()

    def _read_arguments(self, name: str, found: str) -> Steps[str | None]:
        """Reads arguments to the call's end. Returns the marker that ends it.

        Args:
            found: the marker just read, if any: `key_begin` or an end.
        """
        form, reader, log = self._form, self._reader, self._log
        ends = (form.call_end, form.section[1]) if form.section else (form.call_end,)
        markers = Markers((form.key_begin, form.call_begin, *ends))
        marker: str | None = found or (yield from self._read_between(markers))
        first = True
        while marker == form.key_begin:
            marker = ""
            key, convert = yield from self._read_key(name)
            if first and key in form.wrappers and wraps_arguments(self._tools.get(name), key):
                first = False
                marker = yield from reader.opaque(self._read_wrapper(name, key, convert, markers))
            elif key:
                write = log.arguments if key not in self._keys else _drop
                write(f'{"{" if first else ", "}"{quote(key)}": ')
                first = False
                self._keys.add(key)
                marker = yield from reader.opaque(self._read_value(convert, write))
            if marker == "":
                marker = yield from self._read_between(markers)
        is_between = marker == "" and not "".join(self._junk).strip()
        if marker or (is_between and reader.is_model_done):  # the model forgot the end
            log.arguments("{}" if first else "}")
        if not marker:  # the text ended: what is between arguments is an unfinished tag
            self._junk.clear()
        return marker

    def _read_between(self, markers: Markers) -> Steps[str]:
        """Reads what is between arguments, up to a marker. A section's opening marker before a call is no text."""
        marker = yield from self._reader.until(markers, self._junk.append)
        if marker == self._form.call_begin and self._form.section:
            self._junk = ["".join(self._junk).rstrip().removesuffix(self._form.section[0])]
        return marker

    def _read_wrapper(self, name: str, key: str, convert: Convert | None, markers: Markers) -> Steps[str | None]:
        """Reads a first argument that may wrap all others. Returns the marker after it."""
        form, reader, log = self._form, self._reader, self._log
        pieces: list[str] = []
        ends = Markers((form.value_end, form.key_begin, form.call_end))
        marker = yield from reader.until(ends, pieces.append, keep_partial=False)
        if not marker:
            return None
        if marker == form.value_end:
            marker = yield from self._read_between(markers)
        text = "".join(pieces)
        value = convert(text) if convert else f'"{quote(text)}"'
        inner = unwrapped(value, self._tools.get(name)) if marker != form.key_begin else None
        log.arguments(inner[:-1] if inner else f'{{"{quote(key)}": {value}')
        return marker or None

    def _read_key(self, name: str) -> Steps[tuple[str, Convert | None]]:
        """Reads an argument's name; returns it and what makes JSON of its value, None for a string as it is written.

        The name is "" if malformed.
        """
        form, reader = self._form, self._reader
        key = yield from reader.word(_KEY)
        end = yield from reader.accept(*form.key_ends)
        if form.value_begin:
            yield from reader.space()
        written = (yield from self._read_type()) if form.type else ""
        known = (yield from reader.accept(form.value_begin)) if form.value_begin else end
        if not known:
            self._junk.append(form.key_begin + key + end)
            return "", None
        written = written or form.key_ends.get(end, "")  # the value may begin without the end of the name
        return key.strip(), self._converter(self._tools.get(name), key.strip(), written)

    @staticmethod
    def _converter(tool: Tool | None, key: str, written: str) -> Convert | None:
        """Returns the converter of a value's text, which the model marks with the type `written`, into JSON."""
        if written == "json":
            return functools.partial(json_argument, tool=tool, argument=key)
        types = argument_types(tool, key)
        if written and (not types or written in types):
            types = _STRING if written == "any" else frozenset({written})
        return None if types == _STRING else functools.partial(to_json, types=types)

    def _read_type(self) -> Steps[str]:
        """Reads the type of the next value, if the model writes one; returns it, or ""."""
        begin, end = self._form.type or ("", "")
        pieces: list[str] = []
        if (yield from self._reader.accept(begin)):
            yield from self._reader.until(Markers((end,)), pieces.append)
            yield from self._reader.space()
        return "".join(pieces).partition("[")[0].strip().lower()

    def _read_value(self, convert: Convert | None, write: Sink) -> Steps[str | None]:
        """Passes on a value. Returns "" after `value_end`, another marker that ended the value, or None at the end."""
        form, reader = self._form, self._reader
        markers = Markers((form.value_end, form.key_begin, form.call_end) if form.unclosed else (form.value_end,))
        if convert is None:
            text = TrimmedText(form.trim)
            write('"')
            found = yield from reader.until(markers, lambda piece: write(quote(text.push(piece))), keep_partial=False)
            if found:
                write('"')
        else:
            pieces: list[str] = []
            found = yield from reader.until(markers, pieces.append)
            if found:
                text = TrimmedText(form.trim)
                write(convert(text.push("".join(pieces))))
        if not found:
            return None
        return "" if found == form.value_end else found


def _drop(text: str) -> None:
    """Drops the value of an argument that is written twice: clients have the first one."""
