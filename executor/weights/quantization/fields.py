"""Reads the fields of a quantization config. A field of another type than its format defines is refused."""

from collections.abc import Mapping, Sequence
from typing import Any

from quire.core.errors import ModelLoadError


def mapping(config: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    """Returns an object; empty where the config has none.

    Raises:
        ModelLoadError: the field is something else, as in all functions here.
    """
    value = config.get(field) or {}
    if not isinstance(value, Mapping):
        raise _wrong(field, value, "an object")
    return value


def integer(config: Mapping[str, Any], field: str, default: int) -> int:
    """Returns a whole number."""
    value = config.get(field)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong(field, value, "a whole number")
    return value


def names(config: Mapping[str, Any], field: str) -> Sequence[str]:
    """Returns a list of names."""
    value = config.get(field) or ()
    if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) for name in value):
        raise _wrong(field, value, "a list of names")
    return value


def block(config: Mapping[str, Any], field: str) -> tuple[int, int] | None:
    """Returns the outputs and inputs of a block."""
    value = config.get(field)
    if not value:
        return None
    sizes = [each for each in value if type(each) is int and each > 0] if isinstance(value, (list, tuple)) else []
    if len(sizes) != 2 or len(value) != 2:
        raise _wrong(field, value, "a list of two whole numbers, outputs and inputs of a block, such as [128, 128]")
    return sizes[0], sizes[1]


def is_on(config: Mapping[str, Any], field: str) -> bool:
    """Returns a switch, which is on where the config does not name it."""
    value = config.get(field, True)
    if not isinstance(value, bool):
        raise _wrong(field, value, "true or false")
    return value


def _wrong(field: str, value: Any, expected: str) -> ModelLoadError:
    return ModelLoadError(
        f"config.json's quantization_config has {value!r} as {field}, which has to be {expected}. Correct it, or take "
        "the config.json that was written with these weights."
    )
