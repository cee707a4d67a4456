"""Calls in tags with attributes, such as `<function name="f"><param name="a">1</param></function>`.

Values are text; an attribute or the function's schema gives their types. Strings are passed on as they arrive, other
values when complete.
"""

import html
import json
import re
from typing import Any

from msgspec import Struct

from quire.frontend.parsing.arguments.typed_values import argument_types, to_json
from quire.frontend.parsing.event_log import EventLog
from quire.frontend.parsing.json_text import quote
from quire.frontend.parsing.reader import Malformed, Markers, Reader, Sink, Steps
from quire.frontend.parsing.shapes.call_shape import CallShape
from quire.frontend.parsing.shapes.call_tags import CallTag, CallTags, schema_content
from quire.frontend.parsing.shapes.value_tags import Arguments, constant, raw_text, sequence, tag
from quire.frontend.parsing.tools import Tool

_HEADER = re.compile(r"[^<>]*")
_ATTRIBUTE = re.compile(r"""(\w+)=(?:"([^"]*)"|'([^']*)')""")
_STRING = frozenset({"string"})
_ENTITIES = {"&lt;": "<", "&gt;": ">", "&quot;": '"', "&apos;": "'", "&amp;": "&"}
_CDATA = ("<![CDATA[", "]]>")
_WRAPPERS = ("properties", "arguments")


class Tag(Struct, frozen=True):
    """A tag: what opens it, what ends its attributes, and what closes it."""

    begin: str
    header_end: str
    end: str


class AttributeCalls(CallShape, frozen=True, kw_only=True):
    """Calls in tags with attributes.

    Attributes:
        call, name: the tag of a call, and its attribute with the function's name.
        argument, key: the tag of an argument, and its attribute with the argument's name.
        type: the attribute with the type of an argument's value; the function's schema decides if it is empty.
        number: the attribute with the number of a call, if the model writes one.
        section: markers that open and close a group of calls, if the model has groups.
        gap: white space that the model writes between tags.
        offered: only functions that the client offers are called; tags with other names are content.
        escaped: values may be escaped as in XML, or stand in a CDATA section.
        style: XGrammar's name for this notation of arguments, if there is one.
        before: a format, in XGrammar's notation, for text that may precede the calls.
    """

    call: Tag
    name: str
    argument: Tag
    key: str
    type: str = ""
    number: str = ""
    section: tuple[str, str] | None = None
    gap: str = ""
    offered: bool = False
    escaped: bool = False
    style: str = ""
    before: dict[str, Any] | None = None

    @property
    def triggers(self) -> tuple[str, ...]:
        """Markers that may begin a call."""
        return (self.section[0], self.call.begin) if self.section else (self.call.begin,)

    @property
    def markers(self) -> tuple[str, ...]:
        """Literals of the format that may be special tokens."""
        tags = (self.call, self.argument)
        return (*(self.section or ()), *(part for tag in tags for part in (tag.begin, tag.header_end, tag.end)))

    @property
    def stray(self) -> tuple[str, ...]:
        """Closing markers that are not content after a call, even if nothing opened them."""
        return (self.section[1], self.call.end) if self.section else (self.call.end,)

    @property
    def follows_text(self) -> bool:
        """True if a grammar of calls alone allows text before them."""
        return self.before is not None

    def read(self, trigger: str, reader: Reader, log: EventLog, tools: dict[str, Tool]) -> Steps[None]:
        """Reads the calls after a trigger, which was just read."""
        if trigger == self.call.begin:
            yield from self._read_calls(reader, log, tools)
        while self.section:
            yield from reader.space()
            found = yield from reader.accept(self.call.begin, self.section[1])
            if not found and trigger != self.call.begin:
                raise Malformed
            if found != self.call.begin:
                return
            if trigger == self.call.begin:
                reader.start_record(found)
            yield from self._read_calls(reader, log, tools)
            trigger = self.call.begin

    def _read_calls(self, reader: Reader, log: EventLog, tools: dict[str, Tool]) -> Steps[None]:
        """Reads a call after its opening marker, and those whose openers ended the one before."""
        while (yield from _Call(self, reader, log, tools).read()):
            reader.start_record(self.call.begin)

    def call_tags(self, schemas: dict[str, dict[str, Any]]) -> CallTags | None:
        """The format around the arguments' schemas, by function; None if no grammar can describe the format."""
        contents = {name: self._content(schema) for name, schema in schemas.items()}
        if not all(contents.values()):
            return None
        section = self.section and (self.section[0] + self.gap, self.gap + self.section[1])
        return CallTags(
            tags=[self._call_tag(name, content) for name, content in contents.items() if content],
            trigger=self.triggers[0],
            separator="" if self.style else self.gap,
            section=section,
            before=self.before,
        )

    def _content(self, schema: dict[str, Any]) -> dict[str, Any] | None:
        """The arguments of a call of a function with this schema."""
        if self.style:
            return schema_content(schema, self.style)
        begin, end = f'{self.argument.begin} {self.key}="', self.argument.end + self.gap
        key = {"type": "regex", "pattern": '[^<>"]+'}
        others = tag(begin, sequence(key, tag(f'"{self.argument.header_end}', {"type": "any_text"}, end)), "")

        def argument(name: str, value: Any) -> dict[str, Any] | None:
            text = raw_text(value, schema, end, escape=self._escape)
            return sequence(constant(f'{begin}{html.escape(name)}"{self.argument.header_end}'), text) if text else None

        content = Arguments(others={"type": "star", "content": others}).write(schema, argument)
        return content and sequence(constant(self.gap) if self.gap else None, content)

    def _escape(self, text: str) -> str:
        return html.escape(text, quote=False) if self.escaped else text

    def _call_tag(self, name: str, content: dict[str, Any]) -> CallTag:
        begin = f'{self.call.begin} {self.name}="{html.escape(name)}"'
        if not self.number:
            return CallTag(begin + self.call.header_end, content, self.call.end)
        number = {"type": "regex", "pattern": "[0-9]{1,3}"}
        after = {"type": "const_string", "value": f'"{self.call.header_end}'}
        whole = {"type": "sequence", "elements": [number, after, content]}
        return CallTag(f'{begin} {self.number}="', whole, self.call.end)


class _Call:
    """Reads one call, after its opening marker."""

    def __init__(self, form: AttributeCalls, reader: Reader, log: EventLog, tools: dict[str, Tool]) -> None:
        self._form = form
        self._reader = reader
        self._log = log
        self._tools = tools
        self._junk: list[str] = []  # text between arguments
        self._separator = "{"
        self._keys: set[str] = set()
        self._in_value = False

    def read(self) -> Steps[bool]:
        """Reads the call. Returns whether the opening marker of another one ended it."""
        form, reader, log = self._form, self._reader, self._log
        attributes = yield from self._read_attributes(form.call)
        name = self._offered_name(attributes.get(form.name, "") if attributes else "")
        if not name:
            raise Malformed
        reader.stop_record()
        log.call_starts(name)
        ends = Markers((form.argument.begin, form.call.begin, form.call.end, *(form.section or ())[1:]))
        while (found := (yield from reader.until(ends, self._junk.append))) == form.argument.begin:
            yield from self._read_argument(name)
        is_between = not self._in_value and not "".join(self._junk).strip()
        if found or (is_between and reader.is_model_done):  # the model forgot the end
            log.arguments("{}" if self._separator == "{" else "}")
        if not found:  # the text ended: what is between arguments is an unfinished tag
            self._junk.clear()
        log.call_ends()
        if junk := "".join(self._junk).strip():
            log.text(junk)
        return found == form.call.begin

    def _offered_name(self, name: str) -> str:
        """The function that `name` means; empty for none. A function `f` may be called `f.f`."""
        head, _, tail = name.partition(".")
        if name not in self._tools and head == tail and head in self._tools:
            return head
        return "" if self._form.offered and self._tools and name not in self._tools else name

    def _read_attributes(self, tag: Tag) -> Steps[dict[str, str] | None]:
        """Reads a tag's attributes, after its opening marker; None if it is no such tag."""
        header = yield from self._reader.word(_HEADER)
        if not (yield from self._reader.accept(tag.header_end)):
            self._junk.append(tag.begin + header)
            return None
        return {match[1]: html.unescape(match[2] or match[3] or "") for match in _ATTRIBUTE.finditer(header)}

    def _read_argument(self, name: str) -> Steps[None]:
        """Reads one argument, after its opening marker."""
        form, log = self._form, self._log
        attributes = yield from self._read_attributes(form.argument)
        key = (attributes or {}).get(form.key, "")
        if attributes is None or not key:
            return
        types = argument_types(self._tools.get(name), key)
        if form.type:
            types = _STRING if attributes.get(form.type, "string") == "string" else frozenset()
        elif form.escaped and key in _WRAPPERS and not types:
            yield from self._read_wrapped(key)
            return
        write = log.arguments if key not in self._keys else _drop
        self._keys.add(key)
        write(f'{self._separator}"{quote(key)}": ')
        self._separator = ", "
        if types == _STRING:
            write('"')
            if (yield from self._read_value(lambda text: write(quote(text)))):
                write('"')
            return
        pieces: list[str] = []
        if (yield from self._read_value(pieces.append)):
            write(to_json("".join(pieces), types))

    def _read_wrapped(self, key: str) -> Steps[None]:
        """Reads an object that holds all arguments, which some models write as one."""
        pieces: list[str] = []
        if not (yield from self._read_value(pieces.append)):
            return
        value = json.loads(to_json("".join(pieces), frozenset({"object"})))
        for each, item in (value if isinstance(value, dict) else {key: value}).items():
            if each in self._keys:
                continue
            self._keys.add(each)
            self._log.arguments(f'{self._separator}"{quote(each)}": {json.dumps(item, ensure_ascii=False)}')
            self._separator = ", "

    def _read_value(self, sink: Sink) -> Steps[bool]:
        """Passes on a value's text. Returns whether the value ended before the text."""
        self._in_value = True
        self._in_value = not (yield from self._reader.opaque(self._read_text(sink)))
        return not self._in_value

    def _read_text(self, sink: Sink) -> Steps[bool]:
        form, reader = self._form, self._reader
        if not form.escaped:
            return bool((yield from reader.until(Markers((form.argument.end,)), sink, keep_partial=False)))
        if (yield from reader.accept(_CDATA[0])):
            if not (yield from reader.until(Markers((_CDATA[1],)), sink, keep_partial=False)):
                return False
            return bool((yield from reader.until(Markers((form.argument.end,)), lambda _: None)))
        markers = Markers((form.argument.end, *_ENTITIES))
        while (found := (yield from reader.until(markers, sink, keep_partial=False))) in _ENTITIES:
            sink(_ENTITIES[found])
        return bool(found)


def _drop(text: str) -> None:
    """Drops the value of an argument that is written twice: clients have the first one."""
