"""Formats, in XGrammar's notation, for arguments that are not written as JSON: in tags, or as literals.

A format matches exactly the values of a schema. None means that a schema has no format.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from quire.frontend.grammar.pattern_notations import as_regex
from quire.frontend.grammar.pattern_reader import PatternError
from quire.frontend.grammar.patterns import is_anchored, read_pattern
from quire.frontend.grammar.schema import ANNOTATIONS, LARK
from quire.frontend.parsing.arguments.typed_values import schema_types, target_of
from quire.frontend.parsing.literals import PYTHON, Notation

Format = dict[str, Any]
Write = Callable[[str, Any], Format | None]
"""Writes one argument, from its name and the schema of its value."""

_MAX_REFERENCES = 8
_MAX_PARTS = 2000
"""Parts of one format, which a schema that refers to itself would exceed."""
_STRING = frozenset({"string"})
_SCALARS = frozenset({"integer", "number", "boolean", "null"})
_PYTHON_STRING = r""""(?:[^"\\\n]|\\[^\n])*"|'(?:[^'\\\n]|\\[^\n])*'"""
_WORD = re.compile(r"[\w.+\-]+")


def constant(text: str) -> Format:
    """Exactly `text`."""
    return {"type": "const_string", "value": text}


def tag(begin: str, content: Format, end: str) -> Format:
    """`content` between two texts; free text in it ends at the first `end`."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def sequence(*elements: Format | None) -> Format:
    """Elements one after the other; None is skipped."""
    present = [each for each in elements if each is not None]
    return present[0] if len(present) == 1 else {"type": "sequence", "elements": present}


def either(elements: Sequence[Format]) -> Format:
    """One of the elements."""
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


def optional(content: Format) -> Format:
    """Content that may be missing."""
    return {"type": "optional", "content": content}


def dereferenced(schema: Any, root: dict[str, Any]) -> Any:
    """`schema`, or what it refers to in `root`; None where that is nothing, or not all."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            return schema
        schema = target_of(schema["$ref"], root) if not set(schema) - {"$ref", *ANNOTATIONS} else None
    return None


NOTHING = optional(constant(" "))
"""For a call without arguments: XGrammar has no format for the empty text."""


class Arguments(Struct, frozen=True):
    """The order of a call's arguments, which is that of the schema.

    Attributes:
        separator: between two of them.
        others: any number of arguments that the schema does not describe; None where nothing describes these.
    """

    separator: str = ""
    others: Format | None = None

    def write(self, schema: dict[str, Any], write: Write) -> Format | None:
        """The format of all arguments; None if one of them has no format.

        Args:
            schema: of the object that they are.
            write: writes one of them.
        """
        properties, required = schema.get("properties"), schema.get("required", [])
        if set(schema) - {"type", "properties", "required", "additionalProperties", *ANNOTATIONS}:
            return None
        if properties is None:
            return self.others if schema.get("additionalProperties", True) is True and not required else None
        if schema.get("additionalProperties") or not set(required) <= set(properties):
            return None
        written = [(write(name, each), name in required) for name, each in properties.items()]
        if any(each is None for each, _ in written):
            return None
        return self._in_order([(each, must) for each, must in written if each is not None])

    def _in_order(self, arguments: Sequence[tuple[Format, bool]]) -> Format:
        before = constant(self.separator) if self.separator else None
        rest = [sequence(before, each) for each, _ in arguments]
        rest = [each if must else optional(each) for each, (_, must) in zip(rest, arguments, strict=True)]
        if not self.separator:
            return sequence(*rest) if rest else NOTHING
        heads = []  # by the argument that comes first: those before it are left out
        for index, (each, must) in enumerate(arguments):
            heads.append(sequence(each, *rest[index + 1 :]))
            if must:
                return either(heads)
        return optional(either(heads)) if heads else NOTHING


def raw_text(schema: Any, root: dict[str, Any], end: str, *, escape: Callable[[str], str] = str) -> Format | None:
    """A value of `schema`, a part of `root`, as text up to the mark `end`, which belongs to the format.

    Strings are written as they are, other values as JSON.

    Args:
        escape: writes the values of an enumeration as the text has them.
    """
    schema = dereferenced(schema, root)
    if not isinstance(schema, dict):
        return None
    if (values := _enumerated(schema)) is not None:
        texts = [escape(each) if isinstance(each, str) else json.dumps(each) for each in values]
        return sequence(either([constant(each) for each in texts if each]), constant(end)) if all(texts) else None
    if (branches := _branches(schema)) is not None:
        if any(_is_free(dereferenced(each, root)) for each in branches):  # whatever the text is, it is a string
            return tag("", {"type": "any_text"}, end) if schema_types(schema, root) <= {"string", *_SCALARS} else None
        written = [raw_text(each, root, end, escape=escape) for each in branches]
        return either([each for each in written if each is not None]) if written and all(written) else None
    if not set(schema) - ANNOTATIONS:
        return tag("", {"type": "any_text"}, end)
    if schema_types(schema, root) != _STRING:
        definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
        return sequence({"type": "json_schema", "json_schema": {**definitions, **schema}}, constant(end))
    if LARK in schema:
        return sequence({"type": "grammar", "grammar": schema[LARK]}, constant(end))
    return _string_between("", schema, end)


def _branches(schema: dict[str, Any]) -> list[Any] | None:
    """The schemas that a union consists of, if it is one and nothing else."""
    if isinstance(schema.get("type"), list):
        return [{**schema, "type": each} for each in schema["type"]]
    for union in ("anyOf", "oneOf"):
        if isinstance(schema.get(union), list) and not set(schema) - {union, "type", *ANNOTATIONS}:
            return list(schema[union])
    return None


def _is_free(schema: Any) -> bool:
    """True if any string fits."""
    return isinstance(schema, dict) and schema.get("type") == "string" and not set(schema) - {"type", *ANNOTATIONS}


def _string_between(begin: str, schema: dict[str, Any], end: str) -> Format | None:
    """A string between two marks, without the second mark in it; None if a keyword cannot be followed."""
    keywords = {key: value for key, value in schema.items() if key not in ("type", *ANNOTATIONS)}
    match keywords:
        case {"pattern": str(pattern), **others} if not others and (regex := _of_whole_text(pattern)) is not None:
            return tag(begin, {"type": "regex", "pattern": regex}, end)
        case {"pattern": _}:
            return None
    lengths = [keywords.pop("minLength", 0), keywords.pop("maxLength", "")]
    if keywords:
        return None
    if lengths == [0, ""]:
        return tag(begin, {"type": "any_text"}, end)
    return tag(begin, {"type": "regex", "pattern": f"[^{re.escape(end[0])}]{{{lengths[0]},{lengths[1]}}}"}, end)


def _of_whole_text(pattern: str) -> str | None:
    """A pattern for the whole text; None if it may be found within a text, which could then contain the end's mark."""
    try:
        return as_regex(read_pattern(pattern)) if is_anchored(pattern) else None
    except PatternError:
        return None


class Literals:
    """Values in a notation of literals, such as Python's.

    Args:
        root: the schema that references lead to.
    """

    def __init__(self, notation: Notation, root: dict[str, Any]) -> None:
        self._notation = notation
        self._root = root
        self._space = " " if notation is PYTHON else ""
        self._num_parts = 0

    def write(self, schema: Any) -> Format | None:
        """The values of `schema`, a part of the root; None if some keyword cannot be followed."""
        schema = dereferenced(schema, self._root)
        self._num_parts += 1
        if not isinstance(schema, dict) or self._num_parts > _MAX_PARTS:
            return None
        if (values := _enumerated(schema)) is not None:
            return either([constant(self._value(value)) for value in values])
        if (branches := _branches(schema)) is not None:
            written = [self.write(each) for each in branches]
            return either([each for each in written if each is not None]) if written and all(written) else None
        match schema.get("type"):
            case "string":
                return self._string(schema)
            case "array":
                return self._array(schema)
            case "object":
                return self._object(schema)
            case "boolean" if not set(schema) - {"type", *ANNOTATIONS}:
                return either([constant(self._value(each)) for each in (True, False)])
            case "null" if not set(schema) - {"type", *ANNOTATIONS}:
                return constant(self._value(None))
            case "integer" | "number":
                return {"type": "json_schema", "json_schema": schema}
        return None

    def _string(self, schema: dict[str, Any]) -> Format | None:
        quote = self._notation.quotes[0]
        if not self._notation.escapes:
            return _string_between(quote, schema, quote) if LARK not in schema else self._lark(schema, quote)
        if set(schema) - {"type", *ANNOTATIONS}:  # JSON's strings are literals, too
            return {"type": "json_schema", "json_schema": schema}
        return {"type": "regex", "pattern": _PYTHON_STRING}

    @staticmethod
    def _lark(schema: dict[str, Any], quote: str) -> Format:
        return sequence(constant(quote), {"type": "grammar", "grammar": schema[LARK]}, constant(quote))

    def _array(self, schema: dict[str, Any]) -> Format | None:
        item = self.write(schema.get("items"))
        if item is None or set(schema) - {"type", "items", "minItems", "maxItems", *ANNOTATIONS}:
            return None
        least, most = schema.get("minItems", 0), schema.get("maxItems", -1)
        if most == 0:
            return constant("[]")
        more = sequence(constant("," + self._space), item)
        many = {"type": "repeat", "content": more, "min": max(least - 1, 0), "max": most - 1 if most > 0 else -1}
        items = sequence(item, many) if most != 1 else item
        return sequence(constant("["), items if least else optional(items), constant("]"))

    def _object(self, schema: dict[str, Any]) -> Format | None:
        def member(name: str, value: Any) -> Format | None:
            if (written := self.write(value)) is None:
                return None
            return sequence(self._key(name), written)

        members = Arguments("," + self._space).write(schema, member)
        return None if members is None else sequence(constant("{"), members, constant("}"))

    def _key(self, name: str) -> Format:
        if self._notation.bare_keys:
            quote = "" if _WORD.fullmatch(name) else self._notation.quotes[0]
            return constant(f"{quote}{name}{quote}:")
        return either([constant(f"{quoted}:{self._space}") for quoted in dict.fromkeys((repr(name), json.dumps(name)))])

    def _value(self, value: Any) -> str:
        """A value in this notation."""
        between = "," + self._space
        if isinstance(value, dict):
            written: Callable[[object], str] = str if self._notation.bare_keys else repr
            pairs = (f"{written(key)}:{self._space}{self._value(each)}" for key, each in value.items())
            return f"{{{between.join(pairs)}}}"
        if isinstance(value, list):
            return "[" + between.join(map(self._value, value)) + "]"
        if self._notation.escapes:
            return repr(value)
        quote = self._notation.quotes[0]
        return f"{quote}{value}{quote}" if isinstance(value, str) else json.dumps(value)


def _enumerated(schema: dict[str, Any]) -> list[Any] | None:
    """The values of an enumeration, if it is one and nothing else."""
    if set(schema) - {"type", "enum", "const", *ANNOTATIONS}:
        return None
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return values if isinstance(values, list) and values else None
