"""Opens the stages through which the text of one answer passes."""

from collections.abc import Sequence
from typing import TypeAlias

from quire.frontend.parsing.answer_sink import AnswerSink, Held
from quire.frontend.parsing.call_shape import CallShape
from quire.frontend.parsing.event_log import EventLog
from quire.frontend.parsing.harmony import Harmony, read_harmony
from quire.frontend.parsing.output_parser import Fork, Machine, Stage, read_calls
from quire.frontend.parsing.plugins import PluginStage, ReasoningParser, ToolParser
from quire.frontend.parsing.reader import Reader
from quire.frontend.parsing.reasoning import ReasoningShape
from quire.frontend.parsing.response_template import ResponseTemplate
from quire.frontend.parsing.tools import Tool

ToolSource: TypeAlias = CallShape | Harmony | ResponseTemplate | type[ToolParser]
ReasoningSource: TypeAlias = ReasoningShape | Harmony | ResponseTemplate | type[ReasoningParser]


def open_harmony(form: ToolSource | None, log: EventLog, held: Held) -> list[Stage]:
    """The stages of an answer in the Harmony format; none if the text is the answer as it stands."""
    calls, is_held = isinstance(form, Harmony), held != "nothing"
    if is_held and not calls:
        return []
    reader = Reader()
    return [Machine(reader, read_harmony(reader, log, calls=calls, is_held=is_held))]


def open_template(
    template: ResponseTemplate,
    form: ToolSource | None,
    log: EventLog,
    tools: Sequence[Tool],
    prompt_text: str,
    *,
    reasoning: bool,
) -> list[Stage]:
    """The stages of an answer in the format of the checkpoint's response template.

    Args:
        form: the template itself, another format of calls, or None if calls are not parsed.
        reasoning: whether reasoning is separated from the content.
    """
    stages, answer = _open_calls(None if form is template else form, log, tools, is_held=False)
    first = template.open(log, answer.push, prompt_text, tools, reasoning=reasoning, calls=form is template)
    return [first, *stages]


def open_stages(
    form: ToolSource | None,
    reasoning: ReasoningSource | None,
    log: EventLog,
    tools: Sequence[Tool],
    prompt_text: str,
    held: Held,
) -> list[Stage]:
    """The stages of an answer in any other format; none if the text is the answer as it stands."""
    stages, answer = _open_calls(form, log, tools, is_held=held != "nothing")
    if reasoning is None or isinstance(reasoning, Harmony | ResponseTemplate):
        return stages
    if isinstance(reasoning, type):
        return [PluginStage(reasoning(prompt_text), log, answer.push), *stages]
    if held == "whole" and not (stages and reasoning.frames):
        return stages
    reader = Reader()
    steps = reasoning.read(reader, log, answer, opened=reasoning.is_opened(prompt_text))
    first: list[Stage] = [Machine(reader, steps)]
    if held == "whole":
        first.insert(0, Fork((*reasoning.markers, *answer.openers), first[0].push, log.text))
    return [*first, *stages]


def _open_calls(
    form: ToolSource | None, log: EventLog, tools: Sequence[Tool], *, is_held: bool
) -> tuple[list[Stage], AnswerSink]:
    """The stage that finds calls, if they are parsed, and the answer's sink."""
    if isinstance(form, CallShape):
        reader = Reader()
        machine = Machine(reader, read_calls(reader, log, form, tools, is_held=is_held))
        answer = AnswerSink(
            push=machine.push,
            reads_calls=True,
            openers=tuple(trigger for trigger in form.triggers if trigger[1:]),
            is_held=is_held,
            is_opaque=lambda: reader.is_opaque,
        )
        return [machine], answer
    if isinstance(form, type):
        stage = PluginStage(form(tools), log, log.text)
        return [stage], AnswerSink(push=stage.push, reads_calls=True, openers=form.markers, is_held=is_held)
    return [], AnswerSink(push=log.text, is_held=is_held)
