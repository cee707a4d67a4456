"""Opens the filters through which the text of one answer passes."""

from collections.abc import Sequence
from typing import TypeAlias

from quire.frontend.parsing.answer_sink import AnswerSink, Held
from quire.frontend.parsing.answers.output_parser import Fork, Machine, TextFilter, read_calls
from quire.frontend.parsing.event_log import EventLog
from quire.frontend.parsing.formats.harmony import Harmony, read_harmony
from quire.frontend.parsing.formats.reasoning import ReasoningShape
from quire.frontend.parsing.formats.response_template import ResponseTemplate
from quire.frontend.parsing.plugins import PluginFilter, ReasoningParser, ToolParser
from quire.frontend.parsing.reader import Reader
from quire.frontend.parsing.shapes.call_shape import CallShape
from quire.frontend.parsing.tools import Tool

ToolSource: TypeAlias = CallShape | Harmony | ResponseTemplate | type[ToolParser]
ReasoningSource: TypeAlias = ReasoningShape | Harmony | ResponseTemplate | type[ReasoningParser]


def open_harmony(form: ToolSource | None, log: EventLog, held: Held) -> list[TextFilter]:
    """The filters of an answer in the Harmony format; none if the text is the answer as it stands."""
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
) -> list[TextFilter]:
    """The filters of an answer in the format of the checkpoint's response template.

    Args:
        form: the template itself, another format of calls, or None if calls are not parsed.
        reasoning: whether reasoning is separated from the content.
    """
    filters, answer = _open_calls(None if form is template else form, log, tools, is_held=False)
    first = template.open(log, answer.push, prompt_text, tools, reasoning=reasoning, calls=form is template)
    return [first, *filters]


def open_filters(
    form: ToolSource | None,
    reasoning: ReasoningSource | None,
    log: EventLog,
    tools: Sequence[Tool],
    prompt_text: str,
    held: Held,
) -> list[TextFilter]:
    """The filters of an answer in any other format; none if the text is the answer as it stands."""
    filters, answer = _open_calls(form, log, tools, is_held=held != "nothing")
    if reasoning is None or isinstance(reasoning, Harmony | ResponseTemplate):
        return filters
    if isinstance(reasoning, type):
        return [PluginFilter(reasoning(prompt_text), log, answer.push), *filters]
    if held == "whole" and not (filters and reasoning.frames):
        return filters
    reader = Reader()
    steps = reasoning.read(reader, log, answer, opened=reasoning.is_opened(prompt_text))
    first: list[TextFilter] = [Machine(reader, steps)]
    if held == "whole":
        first.insert(0, Fork((*reasoning.markers, *answer.openers), first[0].push, log.text))
    return [*first, *filters]


def _open_calls(
    form: ToolSource | None, log: EventLog, tools: Sequence[Tool], *, is_held: bool
) -> tuple[list[TextFilter], AnswerSink]:
    """The filter that finds calls, if they are parsed, and the answer's sink."""
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
        text_filter = PluginFilter(form(tools), log, log.text)
        return [text_filter], AnswerSink(push=text_filter.push, reads_calls=True, openers=form.markers, is_held=is_held)
    return [], AnswerSink(push=log.text, is_held=is_held)
