"""Calls written as Python: `[f(a=1), g(b="x")]`, or one call a line between tags."""

import re
from typing import Any

from quire.frontend.parsing.arguments.call_arguments import checked_arguments
from quire.frontend.parsing.event_log import EventLog
from quire.frontend.parsing.json_text import quote
from quire.frontend.parsing.literals import PYTHON, read_literal
from quire.frontend.parsing.reader import Malformed, Markers, Reader, Sink, Steps
from quire.frontend.parsing.shapes.call_shape import CallShape
from quire.frontend.parsing.shapes.call_tags import CallTag, CallTags
from quire.frontend.parsing.shapes.value_tags import Arguments, Literals, constant, sequence
from quire.frontend.parsing.tools import Tool

_NAME = re.compile(r"[\w.\-]*")
_SPACE = re.compile(r"\s*")
_KEY = re.compile(r"\w*")
_ANY_ARGUMENTS = r"""
root ::= "" | argument (", " argument)*
argument ::= [a-zA-Z_] [a-zA-Z0-9_]* "=" value
value ::= string | [a-zA-Z0-9_.+\-]+ | "[" items "]" | "(" items ")" | "{" "}" | "{" pair (", " pair)* "}"
items ::= "" | value (", " value)*
pair ::= value ": " value
string ::= "\"" ([^"\\\n] | "\\" [^\n])* "\"" | "'" ([^'\\\n] | "\\" [^\n])* "'"
"""


class PythonCalls(CallShape, frozen=True, kw_only=True):
    """Calls as Python expressions with keyword arguments.

    Attributes:
        begin: markers that open a block of calls.
        end: markers that close a block.
        bare: a list of calls may appear in the text without a tag. It may then only call functions that were offered.
        echoed: the model may repeat the list after a block, with another closing marker.
    """

    begin: tuple[str, ...] = ()
    end: tuple[str, ...] = ()
    bare: bool = False
    echoed: bool = False

    @property
    def triggers(self) -> tuple[str, ...]:
        """Markers that may begin a call."""
        return (*self.begin, "[") if self.bare else self.begin

    @property
    def markers(self) -> tuple[str, ...]:
        """Literals of the format that may be special tokens."""
        return self.begin + self.end

    @property
    def stray(self) -> tuple[str, ...]:
        """Closing markers that are not content after a call, even if nothing opened them."""
        return self.end

    def read(self, trigger: str, reader: Reader, log: EventLog, tools: dict[str, Tool]) -> Steps[None]:
        """Reads the calls after a trigger, which was just read."""
        if trigger not in self.begin:
            yield from self._read_list(reader, log, tools)
        elif (yield from reader.space()) == "[":
            yield from reader.char()
            yield from self._read_list(reader, log, None)
        else:
            yield from self._read_lines(reader, log)
        reader.stop_record()
        yield from reader.space()
        if (yield from reader.accept(*self.end)) and self.echoed:
            yield from self._drop_echo(reader, log, tools)

    def _drop_echo(self, reader: Reader, log: EventLog, tools: dict[str, Tool]) -> Steps[None]:
        """Drops a list that another closing marker follows. Any other text is content."""
        yield from reader.run(_SPACE, log.text)
        if (yield from reader.peek()) == "[":
            text: list[str] = []
            found = yield from reader.until(Markers((*self.begin, *self.end)), text.append)
            echo = "".join(text)
            if found not in self.end and (found or not self.begins_call(echo, tools)):
                log.text(echo)
            if found in self.begin:
                yield from self.read(found, reader, log, tools)

    def begins_call(self, text: str, tools: dict[str, Tool]) -> bool:
        """True if `text`, from a trigger to the end of the answer, can only be the beginning of a call."""
        name, opened, _ = text[1:].lstrip().partition("(")
        known = name.rstrip() in tools if opened else any(each.startswith(name or "(") for each in tools)
        return known or super().begins_call(text, tools)

    def call_tags(self, schemas: dict[str, dict[str, Any]]) -> CallTags | None:
        """The format around the arguments' schemas, by function; None if no grammar can describe the format."""
        contents = {name: _content(schema) for name, schema in schemas.items()}
        if not all(contents.values()):
            return None
        in_lines = bool(self.begin) and not self.bare and not self.echoed
        before, after = (self.begin[0], self.end[0]) if self.begin else ("", "")
        return CallTags(
            tags=[CallTag(f"{name}(", content, ")") for name, content in contents.items() if content],
            trigger=before,
            separator="\n" if in_lines else ", ",
            section=(before, after) if in_lines else (f"{before}[", f"]{after}"),
        )

    @staticmethod
    def _read_list(reader: Reader, log: EventLog, tools: dict[str, Tool] | None) -> Steps[None]:
        """Reads calls with commas between them, to the closing bracket."""
        while True:
            yield from reader.space()
            yield from _read_call(reader, log, tools)
            reader.start_record()
            yield from reader.space()
            if (yield from reader.expect(",", "]")) == "]":
                return
            if (yield from reader.space()) == "]":
                yield from reader.char()
                return

    def _read_lines(self, reader: Reader, log: EventLog) -> Steps[None]:
        """Reads calls with white space between them, as long as a name follows."""
        yield from _read_call(reader, log, None)
        while True:
            reader.start_record()
            char = yield from reader.space()
            if not (char.isalpha() or char == "_"):
                return
            yield from _read_call(reader, log, None)


def _content(schema: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments of a call of a function with this schema."""
    literals = Literals(PYTHON, schema)

    def argument(name: str, value: Any) -> dict[str, Any] | None:
        written = literals.write(value)
        return sequence(constant(f"{name}="), written) if written and name.isidentifier() else None

    return Arguments(", ", others={"type": "grammar", "grammar": _ANY_ARGUMENTS}).write(schema, argument)


def _read_call(reader: Reader, log: EventLog, tools: dict[str, Tool] | None) -> Steps[None]:
    """Reads one call, of one of `tools` if given. The call's first event is logged when its first argument begins."""
    name = yield from reader.word(_NAME)
    if not name or (tools and name not in tools):
        raise Malformed
    yield from reader.space()
    yield from reader.expect("(")
    writer = _Arguments(name, reader, log)
    try:
        yield from _read_arguments(reader, writer)
    except Malformed:
        if not reader.is_at_end:
            writer.mend()
        elif reader.is_cut and not log.in_call:
            writer.start()
        raise
    writer.end()


def _read_arguments(reader: Reader, writer: "_Arguments") -> Steps[None]:
    """Reads arguments to the closing parenthesis."""
    while (yield from reader.space()) != ")":
        key = yield from reader.word(_KEY)
        yield from reader.space()
        if not key or not (yield from reader.accept("=")):
            raise Malformed
        yield from read_literal(reader, writer.value_of(key), PYTHON)
        yield from reader.space()
        if not (yield from reader.accept(",")) and (yield from reader.peek()) != ")":
            raise Malformed
    yield from reader.char()


class _Arguments:
    """Writes a call's arguments as JSON. The call begins with its first value, so that a malformed one begins none."""

    def __init__(self, name: str, reader: Reader, log: EventLog) -> None:
        self._name = name
        self._reader = reader
        self._log = log
        self._keys: set[str] = set()
        self._json = checked_arguments(log, self.start)
        self._json.push("{")

    def value_of(self, key: str) -> Sink:
        """Takes the value of an argument; the second of two with one name is dropped."""
        if key in self._keys:
            return lambda _: None
        self._json.push(f'{", " if self._keys else ""}"{quote(key)}": ')
        self._keys.add(key)
        return self._json.push

    def start(self) -> None:
        """Begins the call."""
        self._reader.stop_record()
        self._log.call_starts(self._name)

    def mend(self) -> None:
        """Ends the arguments after a mistake, and the call if it was begun."""
        self._json.close()
        self._log.call_ends()

    def end(self) -> None:
        """Ends the call."""
        self._json.push("}")
        self._json.close()
        self._log.call_ends()
