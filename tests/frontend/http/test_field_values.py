"""The values that a field may have, found by the path that msgspec's errors have."""

from enum import Enum
from typing import Literal

import pytest
from msgspec import Struct

from quire.frontend.http.field_values import allowed_values


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Part(Struct):
    kind: Literal["a", "b"] | None = None
    colours: list[Colour] = []


class Body(Struct):
    parts: list[Part | int] | Part | None = None
    by_name: dict[str, Part] = {}
    text: str = ""


@pytest.mark.parametrize(
    ("path", "values"),
    [
        ("parts[0].kind", ["a", "b"]),
        ("parts.kind", ["a", "b"]),
        ("parts[3].colours[1]", ["red", "blue"]),
        ("by_name[...].kind", ["a", "b"]),
        ("text", []),
        ("nothing", []),
        ("", []),
    ],
)
def test_values_by_path(path: str, values: list[str]) -> None:
    assert allowed_values(Body, path) == values
    assert allowed_values(Body | None, path) == values
