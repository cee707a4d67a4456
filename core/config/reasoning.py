"""Options: how the model sets its reasoning apart."""

from typing import Annotated

from msgspec import Meta, Struct

_NO_PARSER = "none"


class ReasoningConfig(Struct, frozen=True, kw_only=True):
    """Options for reading a model's reasoning. Constrained formats begin after the reasoning."""

    reasoning_parser: Annotated[
        str | None,
        Meta(
            description="How the model sets its reasoning apart, by name: deepseek_r1, qwen3, ...; with none, "
            "reasoning stays in the text, whatever the checkpoint says."
        ),
    ] = None
    reasoning_parser_plugin: Annotated[
        str | None, Meta(description="Python file that defines more parsers for --reasoning-parser.")
    ] = None

    @property
    def parser_name(self) -> str | None:
        """The parser, if there is to be one."""
        name = self.reasoning_parser
        return None if not name or name.lower() == _NO_PARSER else name
