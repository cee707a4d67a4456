"""The functions that a model may call, and whether it must, in one form for all protocols."""

from typing import Any, Literal

from msgspec import Struct


class Tool(Struct, frozen=True, kw_only=True):
    """One function that the client offers."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None  # JSON schema of the arguments, an object
    strict: bool = False  # the arguments must follow the schema


class ToolChoice(Struct, frozen=True, kw_only=True):
    """What the client wants to be called: `name` says which function when `mode` is "named"."""

    mode: Literal["auto", "none", "required", "named"] = "auto"
    name: str | None = None
    max_calls: int | None = None  # the most in an answer
