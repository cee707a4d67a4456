"""Options of conversations in every protocol, declared as in `core/config/`."""

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import msgspec
from msgspec import Meta, Struct

from quire.core.config.reasoning import ReasoningConfig
from quire.core.errors import ConfigError
from quire.frontend.checkpoint.serving_defaults import ServingDefaults

if TYPE_CHECKING:
    from quire.frontend.parsing.parsers import OutputParsers


class ChatConfig(Struct, frozen=True, kw_only=True):
    """How conversations become prompts, and how their answers are read."""

    chat_template: Annotated[
        str | None, Meta(description="Jinja chat template, as a file or as text; the tokenizer's own when unset.")
    ] = None
    chat_template_content_format: Annotated[
        Literal["auto", "string", "openai"],
        Meta(
            description="How the template gets message content: as a string, as OpenAI's list of parts, "
            "or whichever it reads."
        ),
    ] = "auto"
    default_chat_template_kwargs: Annotated[
        dict[str, Any] | None,
        Meta(description="Variables for the chat template that a request may override.", extra={"parse": "json"}),
    ] = None
    trust_request_chat_template: Annotated[
        bool, Meta(description="Run chat templates that clients send, in the sandbox that all templates run in.")
    ] = False
    exclude_tools_when_tool_choice_none: Annotated[
        bool, Meta(description="Leave tools out of the prompt when a request sets tool_choice to none.")
    ] = False
    enable_auto_tool_choice: Annotated[
        bool, Meta(description="Let the model call functions when it likes to; needs --tool-call-parser.")
    ] = False
    tool_call_parser: Annotated[
        str | None,
        Meta(description="How the model writes calls of functions, by name: hermes, llama3_json, mistral, ..."),
    ] = None
    tool_parser_plugin: Annotated[
        str | None, Meta(description="Python file that defines more parsers for --tool-call-parser.")
    ] = None

    def __post_init__(self) -> None:
        if self.enable_auto_tool_choice and not self.tool_call_parser:
            raise ConfigError("--enable-auto-tool-choice needs --tool-call-parser as well.")
        if self.tool_call_parser or self.tool_parser_plugin:
            self.make_output_parsers(ReasoningConfig())

    def with_defaults(self, checkpoint: ServingDefaults) -> Self:
        """The same options; unset ones come from the checkpoint.

        Raises:
            ConfigError: the checkpoint names a parser that does not exist.
        """
        if self.tool_call_parser is not None or checkpoint.tool_call_parser is None:
            return self
        named = checkpoint.tool_call_parser
        return msgspec.structs.replace(self, tool_call_parser=named, enable_auto_tool_choice=True)

    def make_output_parsers(self, reasoning: ReasoningConfig) -> "OutputParsers":
        """The parsers that find reasoning and calls in answers.

        Raises:
            ConfigError: there is no parser of that name, or a plugin cannot be loaded.
        """
        from quire.frontend.parsing.parsers import OutputParsers  # imported here, because most servers need none

        return OutputParsers(
            self.tool_call_parser,
            reasoning.reasoning_parser,
            tool_plugin=self.tool_parser_plugin,
            reasoning_plugin=reasoning.reasoning_parser_plugin,
            auto_tools=self.enable_auto_tool_choice,
        )

    def read_chat_template(self) -> str | None:
        """The text of `--chat-template`, read from its file unless it is a template itself.

        Raises:
            ConfigError: neither a readable file nor Jinja text.
        """
        if self.chat_template is None:
            return None
        from quire.frontend.text.chat_template import read_template  # imported here: most options need no Jinja

        return read_template(self.chat_template)
