"""What a parser reads does not depend on how the text is cut, whatever the text and wherever it ends.

A format joins by its samples in `tool_samples.py` and `test_reasoning_parsers.py`.
"""

import json
import random
from collections.abc import Iterator

import pytest

from quire.frontend.parsing.answers.parsers import OutputParsers
from quire.frontend.parsing.answers.registry import find_reasoning_parser, find_tool_parser
from quire.frontend.parsing.tools import ToolChoice
from tests.frontend.parsing.rendered_calls import render
from tests.frontend.parsing.test_reasoning_parsers import ANSWER, THOUGHT, written
from tests.frontend.parsing.test_reasoning_parsers import FORMATS as REASONING
from tests.frontend.parsing.test_reasoning_parsers import HANDWRITTEN as REASONING_SAMPLES
from tests.frontend.parsing.test_tool_parsers import FORMATS as TOOLS
from tests.frontend.parsing.test_tool_parsers import chunkings, decoded, parse, wrap
from tests.frontend.parsing.tool_samples import CALLS, HANDWRITTEN
from tests.frontend.parsing.tool_samples import TOOLS as OFFERED

NUM_CHUNKINGS = 20
NUM_DAMAGED = 12
UNTAGGED = {"gigachat3", "llama3_json", "llama4_json", "llama4_pythonic", "phi4_mini_json", "pythonic", "xlam"}
SHORT = ("get_weather", {"city": "Zü🌧️<", "days": 3})


def assert_no_cut_matters(parsers: OutputParsers, text: str) -> None:
    """Parses `text` in any two pieces, and at some cuts."""
    whole = parse(parsers, [text])
    for cut in range(1, len(text)):
        assert parse(parsers, [text[:cut], text[cut:]]) == whole, (text[:cut], text[cut:])
    assert_some_cuts_do_not_matter(parsers, text, NUM_CHUNKINGS)


def assert_some_cuts_do_not_matter(parsers: OutputParsers, text: str, num_chunkings: int = 3) -> None:
    """Parses `text` character by character, and at random cuts."""
    end = random.Random(text).choice(["model", "stop", "limit"])
    whole = parse(parsers, [text], end=end)
    assert parse(parsers, list(text), end=end) == whole, text
    for pieces in chunkings(text, num_chunkings) if len(text) > 2 else ():
        assert parse(parsers, pieces, end=end) == whole, pieces


def damaged(text: str, markers: tuple[str, ...]) -> Iterator[str]:
    """`text` with parts that are missing, doubled, moved, or markers where they do not belong."""
    rng = random.Random(text)
    pieces = [*markers, "<", '"', "{", "}", "\n", "é", "\\"]
    for _ in range(NUM_DAMAGED):
        start, end = sorted(rng.sample(range(len(text) + 1), 2))
        end = min(end, start + rng.randint(1, 12))
        middle = rng.choice(["", text[start:end] * 2, rng.choice(pieces), text[end : 2 * end - start]])
        yield text[:start] + middle + text[end:]


def tool_texts(name: str) -> list[str]:
    """Samples of this format: as models write them, between other text, and with an odd string."""
    texts = [text for each, text, *_ in HANDWRITTEN if each == name]
    form = find_tool_parser(name)
    return [*texts, wrap(name, render(form, [SHORT, CALLS[2]]), "Ünder {1}, [2] <b>.\n", "\n< So\n")]


def reasoning_texts(name: str) -> list[str]:
    """Samples of this format: as models write them, and with odd texts."""
    return [*(text for each, text, *_ in REASONING_SAMPLES if each == name), written(name, THOUGHT, ANSWER)]


@pytest.mark.turns(4)
@pytest.mark.parametrize("name", TOOLS)
def test_calls_do_not_depend_on_the_cuts(name: str):
    parsers = OutputParsers(name)
    for text in [*tool_texts(name), wrap(name, render(find_tool_parser(name), CALLS), "Let me: {1}.\n", "\nDone <")]:
        assert_no_cut_matters(parsers, text)


@pytest.mark.turns(4)
@pytest.mark.parametrize("name", TOOLS)
def test_damaged_calls_do_not_depend_on_the_cuts(name: str):
    parsers = OutputParsers(name)
    form = find_tool_parser(name)
    assert form is not None
    for text in tool_texts(name):
        for each in damaged(text, tuple(form.markers)):
            assert_some_cuts_do_not_matter(parsers, each)


@pytest.mark.turns(4)
@pytest.mark.parametrize("name", TOOLS)
def test_calls_that_end_anywhere_do_not_depend_on_the_cuts(name: str):
    parsers = OutputParsers(name)
    for text in tool_texts(name):
        for end in range(len(text)):
            assert_some_cuts_do_not_matter(parsers, text[:end], 1)


@pytest.mark.parametrize("name", TOOLS)
def test_an_answer_that_ends_within_a_call_shows_no_markup(name: str):
    parsers = OutputParsers(name)
    untagged = name in UNTAGGED
    for _, text, calls, content in (sample for sample in HANDWRITTEN if sample[0] == name):
        for end in range(len(text)):
            parsed = parse(parsers, [text[:end]], end="limit")
            shared = next((at for at, (a, b) in enumerate(zip(parsed.text, content, strict=False)) if a != b), None)
            markup = parsed.text[len(content) if shared is None else shared :]
            if len(markup.strip()) > 2:
                assert untagged, text[:end]
                assert not any(function in markup for function, _ in calls), text[:end]
            for (told, _), (expected, _) in zip(parsed.calls, calls, strict=False):
                assert told == expected


@pytest.mark.parametrize("name", TOOLS)
@pytest.mark.parametrize("mode", ["required", "named"])
def test_a_required_call_that_is_cut_short_is_never_content(name: str, mode: str):
    parsers = OutputParsers(name)
    choice = ToolChoice(mode=mode, name="get_weather" if mode == "named" else None)
    constraint = parsers.constraint(OFFERED, choice)
    assert constraint is not None
    text = render(find_tool_parser(name), [SHORT])
    if constraint.json_schema is not None:
        text = json.dumps(SHORT[1] if mode == "named" else [{"name": SHORT[0], "parameters": SHORT[1]}])
    whole = parse(parsers, [text], choice=choice)
    assert decoded(whole) == [SHORT]
    for end in range(len(text)):
        parsed = parse(parsers, [text[:end]], choice=choice, end="limit")
        assert not parsed.text
        assert all(
            told == "get_weather" and whole.calls[0][1].startswith(arguments.removesuffix("}"))
            for told, arguments in parsed.calls
        )


@pytest.mark.turns(4)
@pytest.mark.parametrize("name", REASONING)
def test_reasoning_does_not_depend_on_the_cuts(name: str):
    parsers = OutputParsers(reasoning_parser=name)
    form = find_reasoning_parser(name)
    assert form is not None
    for text in reasoning_texts(name):
        assert_no_cut_matters(parsers, text)
        for each in damaged(text, tuple(form.markers)):
            assert_some_cuts_do_not_matter(parsers, each)
        for end in range(len(text)):
            assert_some_cuts_do_not_matter(parsers, text[:end], 1)
