"""Calls whose arguments are nested elements, as MiniMax M3 writes them: `]<]minimax[>[<city>Paris]<]minimax[>[</city>`.

Elements carry no types: the function's schema gives them. Arguments are logged when the call is complete, because a
repeated element turns the value before it into a list.
"""

import json
import re
from typing import Any, TypeAlias

from quire.frontend.parsing.arguments.typed_values import properties_of, schema_types, target_of, to_json
from quire.frontend.parsing.event_log import EventLog
from quire.frontend.parsing.reader import Malformed, Markers, Reader, Steps
from quire.frontend.parsing.shapes.call_shape import CallShape
from quire.frontend.parsing.shapes.call_tags import CallTag, CallTags, schema_content
from quire.frontend.parsing.tools import Tool

_MAX_DEPTH = 128
_INVOKE = re.compile(r"\s*name=\s*(?:\"([^\"]+)\"|'([^']+)'|([^\s\"'>]+))\s*")
_HEADER = re.compile(r"[^<>]*")
_MIXED_TEXT = "$text"

Element: TypeAlias = "str | list[tuple[str, Element]]"
"""An element's text, or its children with their names."""


class ElementCalls(CallShape, frozen=True, kw_only=True):
    """Calls with nested elements.

    Attributes:
        namespace: the text before each tag, which separates tags from text of a value.
        style: XGrammar's name for this notation of arguments.
    """

    namespace: str
    style: str

    @property
    def triggers(self) -> tuple[str, ...]:
        """Markers that may begin a call."""
        return (f"{self.namespace}<tool_call>",)

    @property
    def markers(self) -> tuple[str, ...]:
        """Literals of the format that may be special tokens."""
        return tuple(f"{self.namespace}{tag}" for tag in ("<tool_call>", "</tool_call>", "<", "</"))

    @property
    def stray(self) -> tuple[str, ...]:
        """Closing markers that are not content after a call, even if nothing opened them."""
        return (f"{self.namespace}</tool_call>",)

    def read(self, trigger: str, reader: Reader, log: EventLog, tools: dict[str, Tool]) -> Steps[None]:
        """Reads the calls after a trigger, which was just read."""
        begin, end = f"{self.namespace}<invoke", f"{self.namespace}</tool_call>"
        first = True
        while True:
            yield from reader.space()
            found = yield from reader.accept(begin, end)
            if not found and first:
                raise Malformed
            if found != begin:
                return
            if not first:
                reader.start_record(found)
            yield from self._read_call(reader, log, tools)
            first = False

    def _read_call(self, reader: Reader, log: EventLog, tools: dict[str, Tool]) -> Steps[None]:
        """Reads one call, after its opening marker."""
        match = _INVOKE.fullmatch((yield from reader.word(_HEADER)))
        yield from reader.expect(">")
        if match is None:
            raise Malformed
        name = next(group for group in match.groups() if group)
        reader.stop_record()
        log.call_starts(name)
        body: list[str] = []
        closed = yield from reader.opaque(reader.until(Markers((f"{self.namespace}</invoke>",)), body.append))
        tool = tools.get(name)
        schema = tool.parameters if tool and isinstance(tool.parameters, dict) else {}
        read = _Body("".join(body), self.namespace)
        arguments = json.dumps(_Schema(schema).object(read.elements(), schema), ensure_ascii=False)
        is_whole = closed or (reader.is_model_done and read.is_read)  # the model forgot the end
        log.arguments(arguments if is_whole else arguments[:-1])
        log.call_ends()

    def call_tags(self, schemas: dict[str, dict[str, Any]]) -> CallTags:
        """The format around the arguments' schemas, by function."""
        return CallTags(
            tags=[
                CallTag(
                    f'{self.namespace}<invoke name="{name}">',
                    schema_content(schema, self.style),
                    f"{self.namespace}</invoke>",
                )
                for name, schema in schemas.items()
            ],
            trigger=self.triggers[0],
            separator="\n",
            section=(f"{self.triggers[0]}\n", f"\n{self.stray[0]}"),
        )


class _Body:
    """The text of a call, split into elements. The first malformed element and all text after it are dropped."""

    def __init__(self, text: str, namespace: str) -> None:
        self._text = text
        self._namespace = namespace
        self._at = 0

    @property
    def is_read(self) -> bool:
        """True if no text is left."""
        return not self._text[self._at :].strip()

    def elements(self) -> list[tuple[str, Element]]:
        """The elements, with their names."""
        found = []
        try:
            while self._text[self._at :].lstrip().startswith(f"{self._namespace}<"):
                self._at = self._text.index(self._namespace, self._at)
                found.append(self._element(1))
        except (Malformed, ValueError):
            pass
        return found

    def _element(self, depth: int) -> tuple[str, Element]:
        """The element here. Raises `Malformed`, or ValueError at the end of the text."""
        start = self._at + len(self._namespace) + 1
        end = self._text.index(">", start)
        name = self._text[start:end]
        if not name.strip() or name.startswith("/") or depth > _MAX_DEPTH:
            raise Malformed
        closing = f"{self._namespace}</{name}>"
        self._at = end + 1
        texts: list[str] = []
        children: list[tuple[str, Element]] = []
        while True:
            marker = self._text.index(self._namespace, self._at)
            texts.append(self._text[self._at : marker])
            self._at = marker
            if self._text.startswith(closing, marker):
                self._at += len(closing)
                break
            if not self._text.startswith("<", marker + len(self._namespace)):
                raise Malformed
            children.append(self._element(depth + 1))
        text = "".join(texts)
        if children and text.strip():
            children.append((_unused(_MIXED_TEXT, children), text))
        return name, children or text


def _unused(name: str, children: list[tuple[str, Element]]) -> str:
    """`name`, with dollar signs before it until no child has this name."""
    while any(name == each for each, _ in children):
        name = "$" + name
    return name


class _Schema:
    """Gives elements the types of a function's schema.

    Args:
        root: the schema of the arguments, to which references point.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root

    def object(self, elements: list[tuple[str, Element]], schema: dict[str, Any]) -> dict[str, Any]:
        """The elements as an object's fields; repeated elements become a list."""
        properties = properties_of(schema, self._root)
        values: dict[str, list[Any]] = {}
        for name, element in elements:
            known = properties.get(name)
            field = known if known is not None else schema.get("additionalProperties")
            values.setdefault(name, []).append(self._value(element, field))
        return {name: each[0] if len(each) == 1 else each for name, each in values.items()}

    def _value(self, element: Element, schema: Any) -> Any:
        kind, container = self._container(schema, 0)
        if isinstance(element, str):
            types = schema_types(schema, self._root)
            if kind and "string" not in types and not element.strip():  # the template's empty list or object
                return [] if kind == "array" else {}
            return json.loads(to_json(element, types)) if types else element
        if kind == "array":
            return [self._value(child, container.get("items")) for _, child in element]
        return self.object(element, container)

    def _container(self, schema: Any, depth: int) -> tuple[str, dict[str, Any]]:
        """ "array" or "object", whichever the schema allows first, with the part that says so; "" if neither."""
        if not isinstance(schema, dict) or depth > _MAX_DEPTH:
            return "", {}
        parts = [target_of(schema["$ref"], self._root)] if isinstance(schema.get("$ref"), str) else []
        for part in [*parts, *(schema.get("allOf") or ())]:
            kind, container = self._container(part, depth + 1)
            if kind:
                return kind, {**container, "properties": properties_of(schema, self._root)}
        declared = schema.get("type")
        for kind, hints in (("array", ("items",)), ("object", ("properties", "additionalProperties"))):
            if declared == kind or (isinstance(declared, list) and kind in declared):
                return kind, schema
            if declared is None and any(hint in schema for hint in hints):
                return kind, schema
        for branch in [*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]:
            if (found := self._container(branch, depth + 1))[0]:
                return found
        return "", {}
