"""Formats that a checkpoint describes: its response template for `hf`, and a suffix in each of Hunyuan's marks."""

import json
import random
from typing import Any

import pytest

from quire.core.errors import ConfigError
from quire.frontend.parsing.checkpoint_marks import CheckpointMarks, read_marks
from quire.frontend.parsing.parsers import OutputParsers
from quire.frontend.parsing.tools import Tool, ToolChoice
from quire.frontend.text.tokenizer import Tokenizer
from tests.frontend.parsing.rendered_calls import render
from tests.frontend.parsing.tag_matching import accepts
from tests.frontend.parsing.test_chunking import assert_no_cut_matters, assert_some_cuts_do_not_matter, damaged
from tests.frontend.parsing.test_tool_parsers import decoded, parse
from tests.frontend.parsing.tool_samples import CALLS
from tests.frontend.parsing.tool_samples import TOOLS as OFFERED

HERMES: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "content": {"close": "<|im_end|>"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {
                "type": "function",
                "function": {"name": "{content.name}", "arguments": "{content.arguments}"},
            },
        },
    },
}
PATTERNED: dict[str, Any] = {
    "start_anchor": "<start>",
    "fields": {
        "tool_calls": {
            "open_pattern": r"<call (?P<name>\w+)>",
            "close": "</call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</(?P=key)>"},
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}
PROMPT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
WEATHER = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zü🌧️<", "days": 3}}\n</tool_call>'
ANSWER = f"<think>\nHm.\n</think>\n\nLet me see.\n{WEATHER}\n{WEATHER}"


def parsers(template: dict[str, Any], **options: Any) -> OutputParsers:
    names = {"tool_parser": "hf", "reasoning_parser": "hf", **options}
    return OutputParsers(**names, checkpoint=CheckpointMarks(template))


class TestResponseTemplates:
    def test_an_answer_is_read_as_the_template_says(self) -> None:
        read = parse(parsers(HERMES), [ANSWER], prompt_text=PROMPT)
        assert (read.reasoning, read.text) == ("Hm.", "Let me see.")
        assert decoded(read) == [("get_weather", {"city": "Zü🌧️<", "days": 3})] * 2

    def test_beam_is_read_by_the_same_description(self) -> None:
        ours = parsers(HERMES, tool_parser="beam", reasoning_parser="beam")
        assert decoded(parse(ours, [ANSWER], prompt_text=PROMPT)) == decoded(
            parse(parsers(HERMES), [ANSWER], prompt_text=PROMPT)
        )
        with pytest.raises(ConfigError, match="neither goes with another parser"):
            parsers(HERMES, tool_parser="beam", reasoning_parser="qwen3")

    def test_the_prompt_may_have_opened_the_reasoning(self) -> None:
        read = parse(parsers(HERMES), ["Hm.</think>Yes."], prompt_text=PROMPT + "<think>\n")
        assert (read.reasoning, read.text) == ("Hm.", "Yes.")

    def test_values_get_the_types_of_the_schema(self) -> None:
        text = "<call get_weather><city>5</city><days>3</days></call>"
        read = parse(parsers(PATTERNED, reasoning_parser=None), [f"Well. {text}"])
        assert decoded(read) == [("get_weather", {"city": "5", "days": 3})]
        assert read.text == "Well."

    @pytest.mark.parametrize(
        "call", ["<tool_call>{]</tool_call>", '<tool_call>{"name": 5}</tool_call>', "<tool_call>{"]
    )
    def test_what_is_no_call_is_content(self, call: str) -> None:
        read = parse(parsers(HERMES), [f"So: {call}"], prompt_text=PROMPT)
        assert (read.calls, read.text) == ([], f"So: {call}")

    def test_calls_are_content_where_the_client_wants_none(self) -> None:
        read = parse(parsers(HERMES), [ANSWER], prompt_text=PROMPT, choice=ToolChoice(mode="none"))
        assert (read.calls, read.reasoning) == ([], "Hm.")
        assert read.text == f"Let me see.\n{WEATHER}\n{WEATHER}"

    def test_reasoning_is_content_without_its_parser(self) -> None:
        read = parse(parsers(HERMES, reasoning_parser=None), [ANSWER], prompt_text=PROMPT)
        assert len(read.calls) == 2
        assert "Hm." in read.text
        assert not read.reasoning

    def test_a_call_that_is_required_is_json_after_the_reasoning(self) -> None:
        choice = ToolChoice(mode="required")
        constraint = parsers(HERMES).constraint(OFFERED, choice)
        assert constraint is not None
        assert constraint.json_schema is not None
        text = '<think>Hm.</think>[{"name": "get_weather", "parameters": {"city": "Rome"}}]'
        read = parse(parsers(HERMES), [text], prompt_text=PROMPT, choice=choice)
        assert (read.reasoning, decoded(read)) == ("Hm.", [("get_weather", {"city": "Rome"})])
        marks = parsers(HERMES).reasoning_marks(PROMPT)
        assert marks == ("<think>", "</think>")

    def test_the_marks_are_looked_for(self) -> None:
        offered = [Tool(name="get_weather")]
        assert {"<tool_call>", "</tool_call>", "<think>", "</think>"} <= set(parsers(HERMES).markers(offered))

    @pytest.mark.parametrize("template", [HERMES, PATTERNED], ids=["literals", "patterns"])
    def test_no_cut_matters_whatever_the_text(self, template: dict[str, Any]) -> None:
        ours = parsers(template, reasoning_parser="hf" if template is HERMES else None)
        text = ANSWER if template is HERMES else "Well <call get_weather><city>ü</city><days>3</days></call> so <b>."
        assert_no_cut_matters(ours, text)
        for broken in damaged(text, ours.markers(OFFERED)):
            assert_some_cuts_do_not_matter(ours, broken)

    @pytest.mark.parametrize(
        ("template", "names", "word"),
        [
            (None, {}, "there is none"),
            ({"fields": {}}, {}, "non-empty"),
            ({**HERMES, "fields": {**HERMES["fields"], "citations": {"open": "<co>"}}}, {}, "citations"),
            (PATTERNED, {}, "does not describe thinking"),
            (HERMES, {"tool_parser": "hermes"}, "neither goes with another parser"),
        ],
    )
    def test_what_cannot_be_served_is_refused(self, template: Any, names: dict[str, Any], word: str) -> None:
        with pytest.raises(ConfigError, match=word):
            parsers(template, **names)


SUFFIX = ":6124c78e"
SUFFIXED = CheckpointMarks(suffix=SUFFIX)


def suffixed(text: str) -> str:
    for mark in ("think", "tool_calls", "tool_call", "tool_sep", "arg_key", "arg_value"):
        text = text.replace(f"<{mark}>", f"<{mark}{SUFFIX}>").replace(f"</{mark}>", f"</{mark}{SUFFIX}>")
    return text


class TestSuffixes:
    @pytest.mark.parametrize("name", ["hy_v3", "hy_v4"])
    def test_marks_have_the_suffix(self, name: str) -> None:
        ours = OutputParsers(name, name, checkpoint=SUFFIXED)
        plain = "<think>Hm.</think>So.\n" + render(OutputParsers(name)._tools, CALLS)
        read = parse(ours, [suffixed(plain)])
        assert (read.reasoning, read.text, decoded(read)) == ("Hm.", "So.", CALLS)
        assert not parse(ours, [plain]).calls
        assert_some_cuts_do_not_matter(ours, suffixed(plain))
        for broken in damaged(suffixed(plain), ours.markers(OFFERED)):
            assert_some_cuts_do_not_matter(ours, broken)

    @pytest.mark.parametrize("name", ["hy_v3", "hy_v4"])
    def test_a_grammar_of_calls_has_the_suffix(self, name: str) -> None:
        constraint = OutputParsers(name, checkpoint=SUFFIXED).constraint(OFFERED, ToolChoice(mode="required"))
        assert constraint is not None
        assert constraint.structural_tag is not None
        text = render(OutputParsers(name)._tools, CALLS)
        assert accepts(constraint.structural_tag, suffixed(text))
        assert not accepts(constraint.structural_tag, text)

    def test_other_formats_are_as_they_were(self) -> None:
        read = parse(OutputParsers("hermes", checkpoint=SUFFIXED), [WEATHER])
        assert len(read.calls) == 1

    @pytest.mark.parametrize("place", ["token_suffix", "vocabulary"])
    def test_files_of_the_tokenizer_tell_it(self, checkpoint: Any, tmp_path: Any, place: str) -> None:
        folder = checkpoint("llama")
        files = {name: json.loads((folder / name).read_text()) for name in ("tokenizer.json", "tokenizer_config.json")}
        files["tokenizer_config.json"]["response_template"] = HERMES
        if place == "token_suffix":
            files["tokenizer_config.json"]["token_suffix"] = SUFFIX
        else:
            mark = {"id": 900, "content": f"<tool_calls{SUFFIX}>", "special": False}
            rest = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            files["tokenizer.json"]["added_tokens"].append({**mark, **rest})
        for name, content in files.items():
            (tmp_path / name).write_text(json.dumps(content))
        assert read_marks(Tokenizer.from_folder(tmp_path)) == CheckpointMarks(HERMES, SUFFIX)
        assert read_marks(None) == CheckpointMarks()


def test_fuzzed_answers_never_fail() -> None:
    dice = random.Random(0)
    pieces = [
        *WEATHER.split('"'),
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<|im_end|>",
        "{",
        "}",
        '"',
        "é",
        " ",
    ]
    for _ in range(300):
        text = "".join(dice.choices(pieces, k=dice.randint(1, 15)))
        assert_some_cuts_do_not_matter(parsers(HERMES), text)
