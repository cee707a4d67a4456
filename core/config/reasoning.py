"""Options: how the model sets its reasoning apart."""

from typing import Annotated

from msgspec import Meta, Struct


class ReasoningConfig(Struct, frozen=True, kw_only=True):
    """How the model sets its reasoning apart. Formats that answers are held to begin after it."""

    reasoning_parser: Annotated[
        str | None, Meta(description="How the model sets its reasoning apart, by name: deepseek_r1, qwen3, ...")
    ] = None
    reasoning_parser_plugin: Annotated[
        str | None, Meta(description="Python file that defines more parsers for --reasoning-parser.")
    ] = None
