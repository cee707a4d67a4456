"""The parsers that a server is configured with; makes the parser and the grammar of each request."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from msgspec import Struct

from quire.core.errors import ConfigError, ParameterError
from quire.core.wire.sampling_params import ThinkingMarks
from quire.frontend.parsing.answer_sink import Held
from quire.frontend.parsing.answers.filters import (
    ReasoningSource,
    ToolSource,
    open_filters,
    open_harmony,
    open_template,
)
from quire.frontend.parsing.answers.output_parser import EventParser, OutputParser
from quire.frontend.parsing.answers.registry import (
    HARMONY_REASONING,
    HARMONY_TOOLS,
    TEMPLATES,
    find_reasoning_parser,
    find_tool_parser,
)
from quire.frontend.parsing.answers.structure import tool_call_schema, tool_call_structure
from quire.frontend.parsing.call_ids import CHAT_PREFIX, mistral_call_id, random_call_id, with_mistral_ids
from quire.frontend.parsing.event_log import EventLog
from quire.frontend.parsing.formats.checkpoint_marks import CheckpointMarks
from quire.frontend.parsing.formats.escaped_newlines import NewlineLog
from quire.frontend.parsing.formats.harmony import Harmony
from quire.frontend.parsing.formats.reasoning import ReasoningFormat
from quire.frontend.parsing.formats.response_template import ResponseTemplate
from quire.frontend.parsing.shapes.call_shape import CallShape
from quire.frontend.parsing.shapes.json_calls import BareArguments, JsonCalls
from quire.frontend.parsing.tools import Tool, ToolChoice

_FRAMED = frozenset(
    {"inkling", "kimi_k3", "muse", "muse_glimmer", "musespark1x"}
)  # their calls are parts of messages, which the reasoning parser reads
_REQUIRED_CALLS = JsonCalls(bare=True, listed=True, arguments_key="parameters")


class CallConstraint(Struct, frozen=True):
    """The structure that a grammar must enforce for a request's calls; exactly one field is set."""

    structural_tag: dict[str, Any] | None = None
    json_schema: dict[str, Any] | None = None


class ReasoningMarks(NamedTuple):
    """The markers that open and close reasoning; `begin` is None if the prompt has opened it."""

    begin: str | None
    end: str


class OutputParsers:
    """A server's parsers; `open` makes the parser of one sequence.

    Args:
        tool_parser, reasoning_parser: names, as in `--tool-call-parser` and `--reasoning-parser`.
        tool_plugin, reasoning_plugin: Python files that may define more parsers.
        auto_tools: whether calls are parsed if the client leaves the choice to the model.
        checkpoint: what the checkpoint says; None before it is known, to check the names alone.

    Raises:
        ConfigError: no parser has the name, a plugin cannot be loaded, or two parsers do not go together.
    """

    def __init__(
        self,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        *,
        tool_plugin: str | None = None,
        reasoning_plugin: str | None = None,
        auto_tools: bool = True,
        checkpoint: CheckpointMarks | None = None,
    ) -> None:
        frame = tool_parser if tool_parser in _FRAMED else None
        names = {tool_parser, reasoning_parser} - {None}
        if names & {*TEMPLATES} and names - {*TEMPLATES}:
            raise ConfigError(
                f"--tool-call-parser and --reasoning-parser {' or '.join(TEMPLATES)} read one description of the "
                "whole answer: neither goes with another parser."
            )
        self._tools = find_tool_parser(tool_parser, tool_plugin, checkpoint)
        self._reasoning = find_reasoning_parser(reasoning_parser or frame, reasoning_plugin, checkpoint)
        self._marks = self._reasoning.marks if isinstance(self._reasoning, ResponseTemplate) else self._reasoning
        self._auto_tools = auto_tools and self._tools is not None
        harmony = [isinstance(each, Harmony) for each in (self._tools, self._reasoning) if each is not None]
        if any(harmony) and not all(harmony):
            raise ConfigError(
                f"--tool-call-parser {HARMONY_TOOLS} and --reasoning-parser {HARMONY_REASONING} read one format: "
                "neither goes with another parser."
            )
        self._mistral = tool_parser == "mistral"

    @property
    def finds_calls(self) -> bool:
        """True if calls are parsed if the client leaves the choice to the model."""
        return self._auto_tools

    @property
    def reads_calls(self) -> bool:
        """True if the model's format of calls is known."""
        return self._tools is not None

    @property
    def reads_reasoning(self) -> bool:
        """True if reasoning is parsed."""
        return self._reasoning is not None

    def thinking_marks(self, prompt_text: str, encode: Callable[[str], list[int]]) -> ThinkingMarks | None:
        """The markers of reasoning after a prompt, as tokens; None unless a `ReasoningFormat` describes them."""
        if not isinstance(self._marks, ReasoningFormat):
            return None
        return ThinkingMarks(
            begin=[encode(mark) for mark in self._marks.begin],
            end=[encode(mark) for mark in self._marks.end],
            opened=self._marks.is_opened(prompt_text),
        )

    def markers(self, tools: Sequence[Tool] = (), choice: ToolChoice | None = None) -> tuple[str, ...]:
        """Literals that the parser from `open` needs: special tokens among them must not be skipped in the text."""
        forms = (self._tool_format(tools, choice or ToolChoice()), self._reasoning)
        return tuple(marker for form in forms if form is not None for marker in form.markers)

    def readable(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """A conversation whose call ids have the form that the model's template accepts."""
        return with_mistral_ids(messages) if self._mistral else messages

    def open(
        self,
        tools: Sequence[Tool] = (),
        choice: ToolChoice | None = None,
        *,
        prompt_text: str = "",
        call_prefix: str = CHAT_PREFIX,
        held: Held = "nothing",
    ) -> OutputParser | None:
        """The parser of one sequence; None if its text needs no parser, as in a plain chat.

        Args:
            tools: the functions that the client offers.
            choice: the calls that the client wants; None means "auto".
            prompt_text: the rendered prompt, whose end may have opened reasoning.
            call_prefix: the prefix of call ids, unless the model's format or template requires another form.
            held: what is held to a client's format.
        """
        return self.opener(tools, choice, prompt_text=prompt_text, call_prefix=call_prefix, held=held)()

    def opener(
        self,
        tools: Sequence[Tool] = (),
        choice: ToolChoice | None = None,
        *,
        prompt_text: str = "",
        call_prefix: str = CHAT_PREFIX,
        held: Held = "nothing",
    ) -> Callable[[], OutputParser | None]:
        """As `open`, for many sequences of one request: the format of calls is found once."""
        choice = choice or ToolChoice()
        form = self._tool_format(tools, choice)
        if isinstance(form, CallShape) and form.follows_text:
            held = "nothing"
        return functools.partial(self._open, form, tools, choice, prompt_text, call_prefix, held)

    def _open(
        self,
        form: ToolSource | None,
        tools: Sequence[Tool],
        choice: ToolChoice,
        prompt_text: str,
        call_prefix: str,
        held: Held,
    ) -> OutputParser | None:
        log = self._open_log(form, choice, call_prefix, is_held=held != "nothing")
        reasoning: ReasoningSource | None = self._reasoning
        template = next((each for each in (form, reasoning) if isinstance(each, ResponseTemplate)), None)
        if template is not None and held != "nothing":  # which has no calls
            form, reasoning = None, self._marks
        if isinstance(self._tools, Harmony) or isinstance(reasoning, Harmony):
            filters = open_harmony(form, log, held)
        elif template is not None and held == "nothing":
            filters = open_template(template, form, log, tools, prompt_text, reasoning=reasoning is not None)
        else:
            filters = open_filters(form, reasoning, log, tools, prompt_text, held)
        return EventParser(log, filters, max_calls=choice.max_calls) if filters else None

    def _open_log(self, form: ToolSource | None, choice: ToolChoice, call_prefix: str, *, is_held: bool) -> EventLog:
        make_id = mistral_call_id if self._mistral else functools.partial(random_call_id, call_prefix)
        calls_only = form is not None and choice.mode in ("required", "named")
        if isinstance(self._reasoning, ReasoningFormat) and self._reasoning.escaped_newlines:
            return NewlineLog(make_id, calls_only=calls_only, is_held=is_held)
        return EventLog(make_id, calls_only=calls_only)

    def constraint(self, tools: Sequence[Tool], choice: ToolChoice) -> CallConstraint | None:
        """The structure that a grammar must enforce in the answer, after its reasoning; None if any answer is allowed.

        The parser from `open` reads the answers that the grammar allows.

        Raises:
            ParameterError: the model may call a strict function, but no grammar can separate such calls from text.
        """
        if self._structured and (tag := tool_call_structure(self._structured, tools, choice)):
            return CallConstraint(structural_tag=tag)
        if self._auto_tools and choice.mode == "auto" and (strict := [tool.name for tool in tools if tool.strict]):
            raise ParameterError(
                f"The schema or grammar of the function {strict[0]!r} cannot be enforced in this model's format of "
                "calls while the choice is the model's: leave out strict and formats, or set tool_choice to required "
                "or to a function.",
                param="tools",
            )
        schema = tool_call_schema(tools, choice)
        return CallConstraint(json_schema=schema) if schema else None

    def calls_alone(self, tools: Sequence[Tool], choice: ToolChoice) -> dict[str, Any] | None:
        """The structural tag of an answer that consists of calls, though the model may make none.

        Returns:
            None if calls are not parsed, or no structural tag describes them.
        """
        if not self._auto_tools or self._structured is None:
            return None
        return tool_call_structure(self._structured, tools, ToolChoice(mode="required", max_calls=choice.max_calls))

    def reasoning_marks(self, prompt_text: str) -> ReasoningMarks | None:
        """The markers around the reasoning in an answer to this prompt; None if there is none, or none is described."""
        form = self._marks
        if not isinstance(form, ReasoningFormat) or prompt_text.rstrip().endswith(form.end):
            return None
        if not form.is_opened(prompt_text):
            return ReasoningMarks(form.begin[0], form.end[0])
        pairs = zip(form.begin, form.end, strict=False)
        ends = [end for begin, end in pairs if prompt_text.rstrip().endswith(begin)]
        return ReasoningMarks(None, ends[0] if ends else form.end[0])

    @property
    def _structured(self) -> CallShape | Harmony | ResponseTemplate | None:
        """The format of calls, if a grammar may describe it."""
        return None if isinstance(self._tools, type) else self._tools

    def _tool_format(self, tools: Sequence[Tool], choice: ToolChoice) -> ToolSource | None:
        """The format of calls in the answer to this request; None if calls are not parsed."""
        if not tools or choice.mode == "none":
            return None
        if choice.mode == "auto":
            return self._tools if self._auto_tools else None
        if self._structured and tool_call_structure(self._structured, tools, choice):
            return self._tools
        return BareArguments(name=choice.name or tools[0].name) if choice.mode == "named" else _REQUIRED_CALLS
