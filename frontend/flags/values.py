"""Converts a flag's text to its field's value: human-readable integers, choices, JSON, null, ranges.

This module knows fields and text, but no command line.
"""

import argparse
import json
import re
from dataclasses import dataclass, field
from decimal import Decimal
from difflib import get_close_matches
from typing import Any

import msgspec
import msgspec.inspect as mi

POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
_MANY = 16
"""More choices than these are not listed where one that was meant can be told."""
HUMAN_INT = re.compile(r"([+-]?\d+)(\.\d+)?([kmgt]?)", re.IGNORECASE)


def human_int(text: str) -> int:
    """`1k` is 1000, `1K` is 1024, `25.6k` is 25600; a fraction takes a lower-case suffix and is cut."""
    match = HUMAN_INT.fullmatch(text.strip())
    if match is None:
        raise ValueError("needs a whole number such as 4096, 1k (1000), 1K (1024) or 25.6k")
    whole, fraction, suffix = match.groups()
    if not suffix:
        if fraction:
            raise ValueError("needs a whole number; a fraction takes a lower-case suffix, as in 25.6k")
        return int(whole)
    if suffix.isupper():
        if fraction:
            raise ValueError(f"a fraction needs a lower-case suffix: write {text.strip().lower()}")
        return int(whole) * 1024 ** POWERS[suffix.lower()]
    return int(Decimal(whole + (fraction or "")) * 1000 ** POWERS[suffix])


def human_int_or_auto(text: str) -> int:
    """As `human_int`; `auto`, in any case, is -1."""
    try:
        return -1 if text.strip().lower() == "auto" else human_int(text)
    except ValueError as error:
        raise ValueError(f"{error}, or auto") from None


def json_or_text(text: str) -> Any:
    """The JSON value that `text` spells, else `text` itself."""
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return text


@dataclass(frozen=True, eq=False)
class Field:
    """One Struct field, with the facts that its flag needs."""

    group: str
    name: str
    default: Any
    description: str
    kind: mi.Type  # type without null and metadata; of one item when `is_list`
    check: Any  # the annotated type, for range checks
    nullable: bool
    is_list: bool
    parse: str | None = None
    aliases: list[str] = field(default_factory=list)
    value_optional: bool = False
    otherwise: str | None = None
    refused: dict[str, str] = field(default_factory=dict)  # what to do instead, by value
    repeatable: bool = False  # a list whose flag adds to it each time
    protects: bool = False  # an empty value, as of an unset variable, would leave the server open

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def required(self) -> bool:
        return self.default is msgspec.NODEFAULT

    @property
    def is_bool(self) -> bool:
        return isinstance(self.kind, mi.BoolType)

    @property
    def is_json(self) -> bool:
        return self.parse == "json"

    @property
    def metavar(self) -> str:
        """The placeholder for the value in help: its choices, else its kind."""
        if self.is_json:
            return "JSON"
        if isinstance(self.kind, mi.LiteralType):
            return "{" + ",".join(map(str, self.kind.values)) + "}"
        if self.parse == "human_int_or_auto":
            return "N|auto"
        if isinstance(self.kind, mi.IntType):
            return "N"
        return "X" if isinstance(self.kind, mi.FloatType) else "TEXT"

    @property
    def harmless(self) -> str | list[Any]:
        """The values that ask for nothing, as `UnsupportedFlag` has them, where a command does not have the option."""
        if self.is_bool:
            return "on" if self.default else "off"
        if isinstance(self.default, list):
            return self.default
        return [] if self.default is None else [self.default]

    def __call__(self, text: str) -> Any:
        """The value of `text` (of one item when `is_list`), in range.

        Raises:
            argparse.ArgumentTypeError: the value is not allowed; the error quotes it and states what is.
        """
        if self.protects and not text.strip():
            raise argparse.ArgumentTypeError(
                f"is empty, which leaves the server unprotected; give a value, or leave the flag out (got {text!r})"
            )
        if self.nullable and (
            text in ("", "None") or (text.lower() == "none" and not isinstance(self.kind, mi.StrType))
        ):
            return None
        try:
            value = self._convert(text)
            return value if self.is_list and not self.is_json else self.validate(value)
        except (ValueError, msgspec.ValidationError) as error:
            instead = self.refused.get(text, self.otherwise)
            raise argparse.ArgumentTypeError(f"{error} (got {text!r}){f'. {instead}' if instead else ''}") from None

    def _convert(self, text: str) -> Any:
        if self.is_json:
            return self._read_json(text)
        if self.parse == "human_int":
            return human_int(text)
        if self.parse == "human_int_or_auto":
            return human_int_or_auto(text)
        if isinstance(self.kind, mi.LiteralType):
            named = {str(value): value for value in self.kind.values}
            if text not in named:
                raise ValueError(self._choices(text, list(named)))
            return named[text]
        if isinstance(self.kind, mi.IntType):
            return self._number(int, text)
        return self._number(float, text) if isinstance(self.kind, mi.FloatType) else text

    def _choices(self, text: str, names: list[str]) -> str:
        """The choices to name instead of `text`: of many names, only similar ones."""
        near = get_close_matches(text, names) if len(names) > _MANY else []
        if near:
            return f"did you mean {' or '.join(near)}? --help={self.name} lists all"
        return f"choose from {', '.join(names)}"

    def _number(self, kind: type, text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            raise ValueError("needs a whole number" if kind is int else "needs a number") from None

    def _read_json(self, text: str) -> Any:
        wanted = "list" if isinstance(self.kind, mi.ListType) else "object"
        example = '\'["a", "b"]\'' if wanted == "list" else "'{\"key\": 1}'"
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"needs a JSON {wanted} such as {example}; {error.msg} at {error.pos}") from None
        except RecursionError:
            raise ValueError("is nested too deeply") from None
        if not isinstance(value, list if wanted == "list" else dict):
            raise ValueError(f"needs a JSON {wanted} such as {example}")
        return value

    def validate(self, value: Any) -> Any:
        """`value` if it is of the field's type and in its range; ValueError otherwise."""
        if value is not None and isinstance(self.kind, mi.IntType | mi.FloatType) and not _in_range(self.kind, value):
            raise ValueError("must be " + _range_of(self.kind))
        try:
            return msgspec.convert(value, self.check)
        except msgspec.ValidationError as error:
            raise ValueError(self._problem(str(error))) from None

    def _problem(self, text: str) -> str:
        """msgspec's complaint about a value, with the keys or the choices that there are."""
        unknown = re.match(r"Object contains unknown field `(.*?)`", text)
        if unknown and isinstance(self.kind, mi.StructType):
            keys = [each.name for each in self.kind.fields]
            near = get_close_matches(unknown[1], keys, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(keys)}"
            return f"there is no key {unknown[1]}{hint}"
        wrong = re.match(r"Invalid enum value (.*) - at `\$\.(\w+)`", text)
        if wrong and isinstance(self.kind, mi.StructType):
            [kind] = [each.type for each in self.kind.fields if each.name == wrong[2]]
            for each in kind.types if isinstance(kind, mi.UnionType) else [kind]:
                if isinstance(each, mi.LiteralType):
                    return f"{wrong[2]}: choose from {', '.join(map(str, each.values))}"
        return text.lower().replace("`", "")


def _in_range(kind: mi.IntType | mi.FloatType, value: float) -> bool:
    return (
        value == value  # not NaN
        and (kind.ge is None or value >= kind.ge)
        and (kind.gt is None or value > kind.gt)
        and (kind.le is None or value <= kind.le)
        and (kind.lt is None or value < kind.lt)
    )


def _range_of(kind: mi.IntType | mi.FloatType) -> str:
    bounds = [
        f"{word} {bound}"
        for word, bound in (("at least", kind.ge), ("above", kind.gt), ("at most", kind.le), ("below", kind.lt))
        if bound is not None
    ]
    return " and ".join(bounds) or "a number"


def fields_of(struct: type[msgspec.Struct]) -> list[Field]:
    """The fields of an options Struct, in its order."""
    info = mi.type_info(struct)
    assert isinstance(info, mi.StructType)
    annotated = {item.name: item.type for item in msgspec.structs.fields(struct)}
    return [_describe(struct.__name__, item, annotated[item.name]) for item in info.fields]


def _describe(group: str, item: mi.Field, annotated: Any) -> Field:
    kind, description, extra = item.type, "", {}
    if isinstance(kind, mi.Metadata):
        description = (kind.extra_json_schema or {}).get("description", "")
        extra = dict(kind.extra or {})
        kind = kind.type
    nullable = isinstance(kind, mi.UnionType)
    value_optional = extra.get("value_optional", False)
    if isinstance(kind, mi.UnionType):  # with null, and with a bool where the flag may stand alone
        others = (mi.NoneType, mi.BoolType) if value_optional else mi.NoneType
        (kind,) = [member for member in kind.types if not isinstance(member, others)]
    is_list = isinstance(kind, mi.ListType)
    if isinstance(kind, mi.ListType) and extra.get("parse") != "json":
        kind = kind.item_type
    make_default = item.default_factory
    default = item.default if make_default is msgspec.NODEFAULT else make_default()
    return Field(
        group, item.name, default, description, kind, annotated, nullable, is_list,
        parse=extra.get("parse"), aliases=extra.get("aliases", []), value_optional=value_optional,
        otherwise=extra.get("otherwise"), refused=extra.get("refused", {}), repeatable=extra.get("repeatable", False),
        protects=extra.get("protects", False),
    )  # fmt: skip
