"""Formats that a checkpoint describes: its response template for `hf`, and a suffix in each of Hunyuan's marks."""

import json
import random
from typing import Any

import msgspec
import pytest

from quire.core.errors import ConfigError, ParameterError
from quire.frontend.parsing.answers.parsers import OutputParsers
from quire.frontend.parsing.formats.checkpoint_marks import CheckpointMarks, read_marks
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
QWEN: dict[str, Any] = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)"},
    },
}
ATTRIBUTES: dict[str, Any] = {
    "start_anchor": "<start>",
    "fields": {
        "thinking": {"open_pattern": r"to=self<\|message\|>", "close": "<|eom|>"},
        "content": {"open_pattern": r"to=user<\|message\|>", "close": ["<|eot|>", "<|eom|>"]},
        "tool_calls": {
            "open_pattern": r'<x:invoke\b[^>]*?\bname="(?P<name>[^"]+)">',
            "close": "</x:invoke>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r'<x:parameter\b[^>]*?\bname="(?P<key>[^"]+)"[^>]*?>(?P<value>.*?)</x:parameter>',
                "value_parser": {"name": "json", "args": {"allow_non_json": True}},
            },
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}
NAMED: dict[str, Any] = {
    "start_anchor": "<start>",
    "fields": {
        "tool_calls": {
            "open_pattern": r"<\|call\|>(?P<name>\w+)<\|args\|>",
            "close": "<|end|>",
            "content": "json",
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}
WHOLE: dict[str, Any] = {
    "start_anchor": "<start>",
    "fields": {
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}
FORECAST = Tool(
    name="forecast",
    strict=True,
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
)
FORECASTS: list[tuple[dict[str, Any], str]] = [
    (HERMES, '<tool_call>{"name": "forecast", "arguments": {"city": "5", "days": 3}}</tool_call>'),
    (WHOLE, '<tool_call>{"name": "forecast", "arguments": {"city": "5", "days": 3}}</tool_call>'),
    (NAMED, '<|call|>forecast<|args|>{"city": "5", "days": 3}<|end|>'),
    (
        QWEN,
        "<tool_call>\n<function=forecast>\n<parameter=city>\n5\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>",
    ),
    (
        ATTRIBUTES,
        '<x:invoke name="forecast"><x:parameter name="city">5</x:parameter><x:parameter name="days">3</x:parameter>'
        "</x:invoke>",
    ),
]
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

    @pytest.mark.parametrize(("template", "call"), FORECASTS, ids=["json", "whole", "named", "tags", "attributes"])
    def test_a_grammar_enforces_calls_as_the_template_says(self, template: dict[str, Any], call: str) -> None:
        ours = parsers(template, tool_parser="beam", reasoning_parser=None)
        free, required = (
            ours.constraint([FORECAST], ToolChoice()),
            ours.constraint([FORECAST], ToolChoice(mode="required")),
        )
        assert free is not None
        assert required is not None
        assert free.structural_tag is not None
        assert required.structural_tag is not None
        assert accepts(free.structural_tag, f"Let me see. {call}")
        assert accepts(required.structural_tag, call)
        for wrong in (call.replace("3", "three"), call.replace("days", "weeks"), call.replace("forecast", "recast")):
            assert not accepts(free.structural_tag, wrong)
            assert not accepts(required.structural_tag, wrong)
        assert accepts(free.structural_tag, "None is needed.")
        assert not accepts(required.structural_tag, "None is needed.")
        assert decoded(parse(ours, [call], tools=[FORECAST])) == [("forecast", {"city": "5", "days": 3})]
        assert FORECAST.parameters is not None
        others = msgspec.structs.replace(FORECAST, strict=False)
        assert ours.constraint([others], ToolChoice()) is None

    def test_a_call_that_is_required_follows_the_reasoning(self) -> None:
        choice = ToolChoice(mode="required")
        constraint = parsers(HERMES).constraint(OFFERED, choice)
        assert constraint is not None
        assert constraint.structural_tag is not None
        text = '<think>Hm.</think><tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'
        read = parse(parsers(HERMES), [text], prompt_text=PROMPT, choice=choice)
        assert (read.reasoning, decoded(read)) == ("Hm.", [("get_weather", {"city": "Rome"})])
        marks = parsers(HERMES).reasoning_marks(PROMPT)
        assert marks == ("<think>", "</think>")

    def test_what_no_grammar_describes_is_refused_or_json(self) -> None:
        ours = parsers(PATTERNED, reasoning_parser=None)
        with pytest.raises(ParameterError, match="cannot be enforced in this model's format"):
            ours.constraint([FORECAST], ToolChoice())
        required = ours.constraint(OFFERED, ToolChoice(mode="required"))
        assert required is not None
        assert required.json_schema is not None
        strange = msgspec.structs.replace(FORECAST, name="fore<cast>")  # which the pattern of names does not match
        with pytest.raises(ParameterError, match="cannot be enforced in this model's format"):
            parsers(QWEN).constraint([strange], ToolChoice())

    @pytest.mark.parametrize(
        ("value", "read"), [("5", "5"), ("true", "true"), ('"x"', "x"), ("1e5", "1e5"), ("a", "a")]
    )
    def test_strings_of_digits_stay_strings(self, value: str, read: str) -> None:
        text = f'<x:invoke name="get_weather"><x:parameter name="city">{value}</x:parameter>'
        more = f'<x:parameter name="other">{value}</x:parameter></x:invoke>'
        [(_, arguments)] = decoded(parse(parsers(ATTRIBUTES), [text + more], prompt_text="<start>"))
        assert arguments["city"] == read
        assert arguments["other"] == ("a" if value == "a" else json.loads(value))

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
