"""The functions that a model may or must call, in one form for all protocols."""

from typing import Any, Literal

from msgspec import Struct


class Tool(Struct, frozen=True, kw_only=True):
    """One function that the client offers."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None  # JSON schema of the arguments, an object
    strict: bool = False  # the arguments must match the schema


class ToolChoice(Struct, frozen=True, kw_only=True):
    """The calls that the client wants; `name` is the function if `mode` is "named"."""

    mode: Literal["auto", "none", "required", "named"] = "auto"
    name: str | None = None
    max_calls: int | None = None  # most calls in an answer; None for no limit
