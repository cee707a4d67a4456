"""JSON options by dotted keys: `--x.a.b 1`, `--x.list+ v`, `--x.list+=v,w`."""

from dataclasses import dataclass
from typing import Any

import msgspec

from quire.frontend.flags.values import json_or_text


@dataclass(frozen=True)
class DottedValue:
    """One dotted flag as the user wrote it: `flag` is the option's name, `keys` the path within its value."""

    flag: str
    keys: list[str]
    append: bool
    text: str

    @property
    def spelling(self) -> str:
        return ".".join([self.flag, *self.keys]) + ("+" if self.append else "")


def merge(target: Any, dotted: DottedValue) -> Any:
    """A copy of `target` (an object, a list for a bare `--x+`, or None) with one dotted value put in.

    Raises:
        ValueError: a key leads through a value that is no object, or a `+` appends to one that is no list.
    """
    if isinstance(target, msgspec.Struct):  # the result of an earlier key
        target = msgspec.to_builtins(target)
    return _put(target, dotted.keys, dotted)


def _put(node: Any, keys: list[str], dotted: DottedValue) -> Any:
    if keys:
        if node is None:
            node = {}
        if not isinstance(node, dict):
            raise ValueError(f"{keys[0]!r} is a key below {node!r}, which is not an object")
        return {**node, keys[0]: _put(node.get(keys[0]), keys[1:], dotted)}
    if not dotted.append:
        return json_or_text(dotted.text)
    if node is not None and not isinstance(node, list):
        raise ValueError(f"cannot append to {node!r}, which is not a list")
    return [*(node or []), *_items(dotted.text)]


def _items(text: str) -> list[Any]:
    """One JSON value, else the values between commas."""
    whole = json_or_text(text)
    return [whole] if whole != text else [json_or_text(part) for part in text.split(",")]
