"""Where a mark means nothing, it is text: in arguments, in a format that the client asks for, after the reasoning."""

import json
from typing import Any

import pytest

from quire.frontend.parsing.answer_sink import Held
from quire.frontend.parsing.answers.parsers import OutputParsers
from quire.frontend.parsing.answers.registry import find_reasoning_parser, find_tool_parser
from quire.frontend.parsing.formats.reasoning_formats import REASONING_FORMATS
from quire.frontend.parsing.shapes.element_calls import ElementCalls
from quire.frontend.parsing.tools import ToolChoice
from tests.frontend.parsing.rendered_calls import render
from tests.frontend.parsing.test_reasoning_parsers import FORMATS, written
from tests.frontend.parsing.test_tool_parsers import Parsed, decoded, parse
from tests.frontend.parsing.tool_samples import TOOLS

SUITABLE = {
    "cohere_command3": "cohere_command3", "cohere_command4": "cohere_command4", "deepseek_v41": "deepseek_v41",
    "deepseek_v4": "deepseek_v4", "gemma4": "gemma4", "hy_v3": "hy_v3", "hy_v4": "hy_v4", "glm45": "glm45",
    "deepseek_v3": "deepseek_v31", "deepseek_r1": "deepseek_v3", "kimi_k2": "kimi_k2", "kimi_k3": "kimi_k3",
    "mistral": "mistral", "minimax_m2": "minimax_m2", "minimax_m3": "minimax_m3", "seed_oss": "seed_oss",
    "hunyuan_a13b": "hunyuan_a13b", "ernie45": "ernie45", "step3": "step3", "openai_gptoss": "openai",
    "inkling": "inkling", "muse_glimmer": "muse_glimmer", "plamo3": "plamo3", "step3p5": "qwen3_coder",
    "muse": "muse", "k2_horizon": "k2_horizon", "olmo3": "olmo3", "granite": "granite", "minicpmv": "qwen3_coder",
}  # fmt: skip
"""The parser of calls that goes with each of reasoning; hermes for the others."""


def marks(name: str) -> list[str]:
    form = find_reasoning_parser(name)
    assert form is not None
    return list(dict.fromkeys(form.markers))


def cuts(text: str) -> list[list[str]]:
    """The text whole, by characters, and in pieces of three."""
    return [[text], list(text), [text[at : at + 3] for at in range(0, len(text), 3)]]


@pytest.mark.parametrize("name", FORMATS)
def test_after_the_reasoning_text_is_text(name: str):
    parsers = OutputParsers(reasoning_parser=name)
    for mark in marks(name):
        answer = f"I write {mark} at times."
        for pieces in cuts(written(name, "Hm.", answer)):
            assert parse(parsers, pieces) == Parsed(answer, "Hm.", []), mark


@pytest.mark.parametrize("name", FORMATS)
def test_an_argument_holds_any_mark(name: str):
    tools = SUITABLE.get(name, "hermes")
    parsers = OutputParsers(tools, name)
    form = find_tool_parser(tools)
    for mark in marks(name):
        call = ("get_weather", {"city": f"a {mark} b", "days": 5})
        body = render(form, [call])
        if name == "openai_gptoss":
            text = f"<|channel|>analysis<|message|>Hm.<|end|>{body}"
        elif name in ("muse", "muse_glimmer"):
            head = " to=self<|message|>Hm.<|eom|><|start|>assistant to=get_weather<|message|>"
            text = f"{head}{body}<|eom|>"
        elif name == "inkling":
            text = f"<|content_thinking|>Hm.<|end_message|><|message_model|>{body}"
        else:
            text = f"{REASONING_FORMATS[name].begin[0]}Hm.{REASONING_FORMATS[name].end[0]}{body}"
        for pieces in cuts(text):
            parsed = parse(parsers, pieces)
            assert (parsed.text.strip(), parsed.reasoning, decoded(parsed)) == ("", "Hm.", [call]), mark


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("tools", [False, True])
def test_a_clients_format_holds_any_mark(name: str, tools: bool):
    """With tools and without, after reasoning and without any."""
    parser = SUITABLE.get(name, "hermes")
    parsers = OutputParsers(parser, name)
    form = find_tool_parser(parser)
    assert form is not None
    options: dict[str, Any] = {"tools": TOOLS if tools else []}
    for mark in [*marks(name), *form.markers, render(form, [("ping", {})])]:
        answer = json.dumps({"t": f"a {mark} b", "name": "ping", "parameters": {}}, ensure_ascii=False)
        framed = find_reasoning_parser(name)
        held: list[Held] = ["whole"] if parsers.reasoning_marks("") is None else ["whole", "answer"]
        for each in held:
            text = answer
            if each == "answer":
                assert framed is not None
                text = f"{framed.markers[0]}Hm.{REASONING_FORMATS[name].end[0]}\n{answer}"
            for pieces in cuts(text):
                if parsers.open(held=each, **options) is None:
                    assert each == "whole", "the text is the answer as it stands"
                    continue
                assert parse(parsers, pieces, held=each, **options) == Parsed(
                    answer, "Hm." if each == "answer" else "", []
                ), text


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_with_a_format_may_be_calls_instead(name: str):
    parser = SUITABLE.get(name, "hermes")
    parsers = OutputParsers(parser, name)
    calls = [("get_weather", {"city": "</think> Paris"}), ("ping", {})]
    form = find_tool_parser(parser)
    if not isinstance(form, ElementCalls) and parsers.calls_alone(TOOLS, ToolChoice()) is None:
        pytest.skip("nothing describes these calls")
    text = render(form, calls).removeprefix("<|start|>assistant")
    for pieces in cuts(text):
        parsed = parse(parsers, pieces, held="whole")
        assert (decoded(parsed), parsed.text.strip()) == (calls, "")


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "glm45", "mistral", "kimi_k2", "deepseek_v3", "gemma4"])
def test_a_closing_mark_is_text_unless_it_closes_a_call(name: str):
    form = find_tool_parser(name)
    parsers = OutputParsers(name)
    call = render(form, [("ping", {})])
    for mark in form.stray:  # type: ignore[union-attr]
        for text, expected in [
            (f"{call}\n{mark}\nDone.", "Done."),
            (f"{call}\nIt ends with {mark}, always.", f"It ends with {mark}, always."),
            (f"It ends with {mark}, always.", f"It ends with {mark}, always."),
        ]:
            for pieces in cuts(text):
                assert parse(parsers, pieces).text == expected


def test_text_before_reasoning_may_hold_a_call() -> None:
    text = '[TOOL_CALLS]ping[ARGS]{"x": "[THINK] a [/THINK]"}'
    parsers = OutputParsers("mistral", "mistral")
    for pieces in cuts(text):
        assert decoded(parse(parsers, pieces)) == [("ping", {"x": "[THINK] a [/THINK]"})]


def test_escaped_line_breaks_of_a_clients_format_stay() -> None:
    parsers = OutputParsers(reasoning_parser="minicpmv")
    for pieces in cuts('<think>a\\nb</think>{"t": "a\\nb"}'):
        assert parse(parsers, pieces, held="answer") == Parsed('{"t": "a\\nb"}', "a\nb", [])
