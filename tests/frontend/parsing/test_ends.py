"""The end of an answer: text stays text, and a call whose arguments have no end is told as such."""

import json

import pytest

from quire.frontend.chat.answer_events import Choice
from quire.frontend.outputs import CompletionOutput
from quire.frontend.parsing.answers.parsers import OutputParsers
from quire.frontend.parsing.answers.registry import find_reasoning_parser, find_tool_parser
from quire.frontend.parsing.events import Event, Finish, ToolCallEnd
from quire.frontend.parsing.formats.harmony import Harmony
from tests.frontend.parsing.rendered_calls import render
from tests.frontend.parsing.test_reasoning_parsers import FORMATS as REASONING
from tests.frontend.parsing.test_reasoning_parsers import written
from tests.frontend.parsing.test_tool_parsers import FORMATS as TOOLS
from tests.frontend.parsing.test_tool_parsers import Parsed, parse
from tests.frontend.parsing.tool_samples import TOOLS as OFFERED

PARIS = ("get_weather", {"city": "Paris, the big one"})


def beginnings(marks: tuple[str, ...]) -> list[str]:
    """Every beginning of a mark, without those that are whole marks."""
    return sorted({mark[:end] for mark in marks for end in range(1, len(mark))} - set(marks))


def triggers(name: str) -> tuple[str, ...]:
    form = find_tool_parser(name)
    assert form is not None
    return form.markers if isinstance(form, Harmony) else (*form.triggers, *form.markers)  # type: ignore[union-attr]


@pytest.mark.parametrize("name", TOOLS)
def test_the_beginning_of_a_mark_is_text(name: str):
    parsers = OutputParsers(name)
    for beginning in beginnings(triggers(name)):
        text = f"code: {beginning}"
        for end in "model", "stop":
            assert parse(parsers, [text], end=end) == Parsed(text, "", []), text
        assert parse(parsers, list(text), end="model") == Parsed(text, "", []), text


@pytest.mark.parametrize("name", REASONING)
def test_the_beginning_of_a_mark_of_reasoning_is_text(name: str):
    form = find_reasoning_parser(name)
    assert form is not None
    parsers = OutputParsers(reasoning_parser=name)
    whole = written(name, "Hm.", "code: ")
    for beginning in beginnings(form.markers):
        text = whole[: whole.index("code: ") + 6] + beginning
        for pieces in [text], list(text):
            assert parse(parsers, pieces) == Parsed(f"code: {beginning}", "Hm.", []), text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("k2_horizon", "Before<ifm|tool_calls><ifm|tool_call>ping"),
        ("hermes", 'Before <tool_call>\n{"name": "ping", "argu'),
        ("hermes", "Before <tool_call>"),
        ("llama3_json", 'Before {"name": "ping"'),
        ("mistral", "Before [TOOL_CALLS]ping[ARGS]"),
        ("qwen3_coder", "Before <tool_call>\n<function=ping"),
        ("glm45", "Before <tool_call>ping\n"),
        ("kimi_k2", "Before <|tool_calls_section_begin|><|tool_call_begin|>functions.ping"),
        ("apertus", 'Before <|tools_prefix|>[{"ping"'),
        ("pythonic", "Before [ping("),
    ],
)
def test_what_the_model_ended_before_it_was_a_call_is_text(name: str, text: str):
    parsers = OutputParsers(name)
    assert parse(parsers, [text]) == parse(parsers, list(text)) == Parsed(text, "", [])
    assert parse(parsers, [text], end="limit").text in ("Before", "Before ")


def choice(name: str, text: str, reason: str, stop_reason: int | str | None) -> list[Event]:
    """The events of a text that ended for a reason."""
    reader = Choice(OutputParsers(name).open(OFFERED))
    return reader.read(
        CompletionOutput(
            index=0,
            text=text,
            token_ids=[],
            cumulative_logprob=None,
            logprobs=None,
            finish_reason=reason,
            stop_reason=stop_reason,
        )
    )


@pytest.mark.parametrize("name", TOOLS)
@pytest.mark.parametrize(("reason", "stop_reason"), [("stop", "big"), ("stop", 7), ("stop", None), ("length", None)])
def test_a_call_whose_arguments_have_no_end_is_none_that_can_be_made(
    name: str, reason: str, stop_reason: int | str | None
):
    whole = render(find_tool_parser(name), [PARIS])
    *_, end, finish = choice(name, whole[: whole.index("big")], reason, stop_reason)
    assert finish == Finish(reason, stop_reason)  # type: ignore[arg-type]
    assert end == ToolCallEnd(0, is_cut=True, is_broken=True)


@pytest.mark.parametrize("name", TOOLS)
def test_a_stop_string_behind_the_arguments_leaves_the_call_as_it_is(name: str):
    *_, finish = choice(name, render(find_tool_parser(name), [PARIS]), "stop", "<")
    assert finish == Finish("tool_calls", "<")


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "minicpm5", "hy_v3", "dots", "muse_glimmer", "kimi_k3"])
def test_a_call_whose_closing_mark_the_model_forgot_is_complete(name: str):
    whole = render(find_tool_parser(name), [("get_weather", {"city": "Paris", "days": 3})])
    form = find_tool_parser(name)
    end = form.call.end if hasattr(form, "call") else form.call_end  # type: ignore[union-attr]
    text = whole[: whole.rindex(end)]
    [(called, arguments)] = parse(OutputParsers(name), [text]).calls
    assert (called, json.loads(arguments)) == ("get_weather", {"city": "Paris", "days": 3})
    assert choice(name, text, "stop", None)[-1] == Finish("tool_calls")
    assert choice(name, text, "stop", "x")[-1] == Finish("stop", "x")
