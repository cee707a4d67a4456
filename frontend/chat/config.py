"""Options of conversations in every protocol, declared as in `core/config/`."""

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import msgspec
from msgspec import Meta, Struct

from quire.core.config.reasoning import ReasoningConfig
from quire.core.errors import ConfigError
from quire.core.logging import get_logger
from quire.frontend.checkpoint.serving_defaults import FILE_NAME, ServingDefaults

if TYPE_CHECKING:
    from quire.frontend.chat.chat_input import ChatInput
    from quire.frontend.parsing.answers.parsers import OutputParsers
    from quire.frontend.parsing.formats.checkpoint_marks import CheckpointMarks

logger = get_logger(__name__)


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
    reasoning_effort_map: Annotated[
        dict[Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"], str] | None,
        Meta(
            description="What the chat template gets for a request's reasoning effort, such as "
            '{"medium": "high"}, for templates that know other efforts than clients send.',
            extra={"parse": "json"},
        ),
    ] = None
    trust_request_chat_template: Annotated[
        bool, Meta(description="Run chat templates that clients send, in the sandbox that all templates run in.")
    ] = False
    trust_request_mm_kwargs: Annotated[
        bool,
        Meta(
            description="Take mm_processor_kwargs and media_io_kwargs of requests, which say how their images, videos "
            "and sounds are read, and so how much memory and time these take."
        ),
    ] = False
    exclude_tools_when_tool_choice_none: Annotated[
        bool, Meta(description="Leave tools out of the prompt when a request sets tool_choice to none.")
    ] = False
    enable_auto_tool_choice: Annotated[
        bool,
        Meta(
            description="Let the model call functions when it likes to. The parser is that of --tool-call-parser, else "
            "the one that the checkpoint names or that its chat template shows."
        ),
    ] = False
    tool_call_parser: Annotated[
        str | None,
        Meta(description="How the model writes calls of functions, by name: hermes, llama3_json, mistral, ..."),
    ] = None
    tool_parser_plugin: Annotated[
        str | None, Meta(description="Python file that defines more parsers for --tool-call-parser.")
    ] = None

    def __post_init__(self) -> None:
        if self.tool_call_parser or self.tool_parser_plugin:
            self.make_output_parsers(ReasoningConfig())

    def with_defaults(
        self, checkpoint: ServingDefaults, template: str | None = None, *, announces: bool = True
    ) -> Self:
        """The same options; unset ones come from the checkpoint.

        Args:
            template: the model's chat template, which shows the form of calls that `enable_auto_tool_choice` needs.
            announces: log the form of calls if it comes from there.

        Raises:
            ConfigError: the checkpoint names a parser that does not exist, or calls are wanted and nothing shows their
                form.
        """
        if self.tool_call_parser is not None:
            return self
        name, source = checkpoint.tool_call_parser, FILE_NAME
        if name is None:
            if not self.enable_auto_tool_choice:
                return self
            name, source = _recognized(template), "the chat template"
        if announces:
            logger.info("calls of functions are read as %s, by %s", name, source)
        return msgspec.structs.replace(self, tool_call_parser=name, enable_auto_tool_choice=True)

    def template_variables(self, chat: "ChatInput") -> dict[str, Any]:
        """Variables of the chat template: the client's over those of its effort, and over the server's defaults.

        Some templates read the effort, others only whether to think.
        """
        effort = chat.reasoning_effort
        effort = (self.reasoning_effort_map or {}).get(effort, effort)  # type: ignore[call-overload]
        thinking = {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        return {**(self.default_chat_template_kwargs or {}), **thinking, **chat.template_variables}

    def make_output_parsers(
        self, reasoning: ReasoningConfig, checkpoint: "CheckpointMarks | None" = None
    ) -> "OutputParsers":
        """The parsers that find reasoning and calls in answers.

        Args:
            checkpoint: what it says of its format; None before it is known.

        Raises:
            ConfigError: there is no parser of that name, or a plugin cannot be loaded.
        """
        from quire.frontend.parsing.answers.parsers import (
            OutputParsers,  # imported here, because most servers need none
        )

        return OutputParsers(
            self.tool_call_parser,
            reasoning.parser_name,
            tool_plugin=self.tool_parser_plugin,
            reasoning_plugin=reasoning.reasoning_parser_plugin,
            auto_tools=self.enable_auto_tool_choice,
            checkpoint=checkpoint,
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


def _recognized(template: str | None) -> str:
    # Imported here, because most servers need no parser.
    from quire.frontend.parsing.answers.registry import tool_parser_names
    from quire.frontend.parsing.formats.recognition import recognize

    name = recognize(template or "")
    if name is None:
        raise ConfigError(
            "--enable-auto-tool-choice: neither the checkpoint nor its chat template shows how the model writes calls; "
            f"add --tool-call-parser with one of {', '.join(tool_parser_names())}."
        )
    return name
