"""Checks the types of a Struct's fields, which msgspec checks only where it decodes."""

import functools
import types
from enum import Enum
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

import msgspec
from msgspec import Struct

from quire.core.errors import ParameterError


class _Field(NamedTuple):
    """A field of a Struct. `is_flag`: it holds true or false, or perhaps None."""

    name: str
    default: Any
    kind: Any
    is_flag: bool


def check_types(struct: Struct) -> None:
    """Converts every field to its annotated type: reads a number of another library, and 0 or 1 for a flag.

    A field that holds its default is not looked at. Structs in fields are checked too.

    Raises:
        ParameterError: a value has another type; `param` names the field.
    """
    for field in _fields(type(struct)):
        value = getattr(struct, field.name)
        if value is not field.default:
            read = _read(field, value)
            if isinstance(read, (bool, float, Enum)):
                setattr(struct, field.name, read)


def read_numbers(struct: Struct) -> None:
    """Replaces NumPy's scalars and arrays in a Struct's fields by Python's."""
    for field in _fields(type(struct)):
        value = getattr(struct, field.name)
        if value is not field.default:
            plain = plain_numbers(value)
            if plain is not value:
                setattr(struct, field.name, plain)


_PLAIN = {bool, int, float, str}


def plain_numbers(value: Any) -> Any:
    """Converts NumPy's scalars and arrays, and lists of its scalars, to Python's; returns any other value as it is."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if not isinstance(value, (list, tuple)) or _PLAIN.issuperset(map(type, value)):
        return value
    return [plain_numbers(each) for each in value] if any(hasattr(each, "tolist") for each in value) else value


def _read(field: _Field, value: Any) -> Any:
    if isinstance(value, Struct):
        check_types(value)
    try:
        read = msgspec.convert(_loosely(value, is_flag=field.is_flag), field.kind, strict=True)
    except (msgspec.ValidationError, RecursionError, OverflowError) as error:
        raise ParameterError(f"{field.name} has a wrong type: {error}.", param=field.name) from None
    if isinstance(read, Struct) and read is not value:
        wanted, given = type(read).__name__, type(value).__name__
        raise ParameterError(f"{field.name} must be a {wanted}, not {given}.", param=field.name)
    return read


def _loosely(value: Any, *, is_flag: bool) -> Any:
    if is_flag and not isinstance(value, (bool, str, list)) and value in (0, 1):
        return bool(value)
    if isinstance(value, float) and type(value) is not float:  # NumPy's float64, which msgspec does not encode
        return float(value)
    return value


@functools.cache
def _fields(kind: type[Struct]) -> list[_Field]:
    found = msgspec.structs.fields(kind)
    return [_Field(each.name, each.default, each.type, _alternatives(each.type) == {bool}) for each in found]


def _alternatives(kind: Any) -> set[Any]:
    """The types of a union without None, or the type alone."""
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    parts = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    return {part for part in parts if part is not types.NoneType}
