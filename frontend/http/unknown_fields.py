"""Unknown fields of a request, which its Structs do not declare: removes, lists in a header, and logs them.

Clients grow fields every month. Ignored fields stay visible, because one may be a misspelled known field.
"""

import difflib
import functools
import re
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import quote

import msgspec.inspect
from msgspec.inspect import DictType, Field, ListType, StructType, UnionType

from quire.core.logging import get_logger

logger = get_logger(__name__)

HEADER = b"x-quire-ignored-fields"
MAX_NAME_CHARACTERS = 100
MAX_HEADER_BYTES = 1000
MAX_FIELDS = 64
"""Most unknown fields of one request that are listed."""

MAX_LOGGED = 256
"""Most names that a process logs."""

_INDEX = re.compile(r"\[\d+\]")


class IgnoredFields:
    """The ignored fields of one request. Fields of one name in several elements of a list are listed once."""

    def __init__(self) -> None:
        self._paths: dict[str, str] = {}  # by path without indices; the value has the first index

    def __bool__(self) -> bool:
        return bool(self._paths)

    def add(self, path: str) -> None:
        """Lists a field, such as `tools[0].colour`."""
        path = path if len(path) <= MAX_NAME_CHARACTERS else path[:MAX_NAME_CHARACTERS] + "..."
        if len(self._paths) < MAX_FIELDS:
            self._paths.setdefault(_INDEX.sub("[]", path), path)

    @property
    def names(self) -> Iterable[str]:
        """The fields without indices."""
        return self._paths

    def header(self) -> bytes:
        """The value of the answer's header: paths with commas between them, percent-encoded where they must be."""
        shown, room = [], MAX_HEADER_BYTES
        for path in self._paths.values():
            text = quote(path, safe="[]$@:/!*+'()", errors="replace")
            room -= len(text) + 2
            if room < 0:
                shown.append("...")
                break
            shown.append(text)
        return ", ".join(shown).encode("ascii")


class IgnoredFieldsLog:
    """Logs each name of an ignored field once."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def add(self, ignored: IgnoredFields, kind: Any) -> None:
        """Logs the names that are new; `kind` is the body's type."""
        for name in ignored.names:
            if name in self._logged or len(self._logged) >= MAX_LOGGED:
                continue
            self._logged.add(name)
            logger.warning("ignored in a request: %r.%s", name, nearest(name, kind))
            if len(self._logged) == MAX_LOGGED:
                logger.warning("%d names of ignored fields are logged; others will not be", MAX_LOGGED)


def nearest(name: str, kind: Any) -> str:
    """A sentence that names the field of `kind` with almost the same spelling; empty without one."""
    members = kind.__args__ if hasattr(kind, "__args__") else (kind,)
    known = [field for member in members for field in member.__struct_encode_fields__]
    close = difflib.get_close_matches(name[:MAX_NAME_CHARACTERS], known, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def without_unknown(value: Any, kind: Any, ignored: IgnoredFields) -> Any:
    """`value`, decoded JSON, without the fields that the Structs in `kind` do not declare; these go to `ignored`."""
    known = _reader(msgspec.inspect.type_info(kind))
    return value if known is None else known(value, "", ignored)


_Reader = Callable[[Any, str, IgnoredFields], Any]


@functools.cache
def _fields(kind: type) -> dict[str, _Reader | None]:
    """The fields of a Struct by name, each with a reader if it holds Structs itself."""
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, StructType)
    fields: Iterable[Field] = info.fields
    return {field.encode_name: _reader(field.type) for field in fields} | (
        {info.tag_field: None} if info.tag_field is not None else {}
    )


def _reader(kind: msgspec.inspect.Type) -> _Reader | None:
    """A function that removes unknown fields from a value of type `kind`; None if it holds no Struct."""
    if isinstance(kind, StructType):
        return functools.partial(_read_struct, kind.cls)
    if isinstance(kind, UnionType):  # no body has a union with two Structs
        return next((reader for member in kind.types if (reader := _reader(member)) is not None), None)
    if isinstance(kind, ListType) and (item := _reader(kind.item_type)) is not None:
        return functools.partial(_read_list, item)
    if isinstance(kind, DictType) and (item := _reader(kind.value_type)) is not None:
        return functools.partial(_read_dict, item)
    return None


def _read_struct(kind: type, value: Any, path: str, ignored: IgnoredFields) -> Any:
    if not isinstance(value, dict):
        return value
    fields, known = _fields(kind), {}
    for name, each in value.items():
        place = f"{path}.{name}" if path else name
        if name not in fields:
            ignored.add(place)
        else:
            reader = fields[name]
            known[name] = each if reader is None else reader(each, place, ignored)
    return known


def _read_list(item: _Reader, value: Any, path: str, ignored: IgnoredFields) -> Any:
    if not isinstance(value, list):
        return value
    return [item(each, f"{path}[{index}]", ignored) for index, each in enumerate(value)]


def _read_dict(item: _Reader, value: Any, path: str, ignored: IgnoredFields) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: item(each, f"{path}.{name}", ignored) for name, each in value.items()}
