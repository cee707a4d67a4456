"""The values that a field of a body may have, for errors about others."""

import re
from collections.abc import Iterator
from typing import Any

import msgspec.inspect
from msgspec.inspect import DictType, EnumType, ListType, LiteralType, StructType, Type, UnionType

_STEP = re.compile(r"\[[^\]]*\]|[^.\[\]]+")


def allowed_values(kind: Any, path: str) -> list[str]:
    """The values of the field at `path`, such as `parameters.kinds[0]`, of a body of type `kind`; empty where they have
    no names."""
    types = [msgspec.inspect.type_info(kind)]
    for step in _STEP.findall(path):
        types = [below for each in types for below in _below(each, step)]
    return [str(value) for each in types for member in _members(each) for value in _values(member)]


def _members(kind: Type) -> Iterator[Type]:
    if isinstance(kind, UnionType):
        for each in kind.types:
            yield from _members(each)
    else:
        yield kind


def _below(kind: Type, step: str) -> Iterator[Type]:
    for member in _members(kind):
        match member:
            case StructType(fields=fields):
                yield from (field.type for field in fields if field.encode_name == step)
            case ListType(item_type=item) if step.startswith("["):
                yield item
            case DictType(value_type=value):
                yield value


def _values(kind: Type) -> list[Any]:
    match kind:
        case LiteralType(values=values):
            return list(values)
        case EnumType(cls=members):
            return [member.value for member in members]
    return []
