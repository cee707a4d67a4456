"""Tool parsers: calls are found however the text is cut, and other text stays content."""

import json
import random
import re
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.config.reasoning import ReasoningConfig
from quire.core.errors import ConfigError
from quire.frontend.checkpoint.serving_defaults import ServingDefaults
from quire.frontend.http.server_config import ServerConfig
from quire.frontend.parsing.answers.parsers import OutputParsers
from quire.frontend.parsing.answers.registry import find_tool_parser, tool_parser_names
from quire.frontend.parsing.events import (
    Event,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from quire.frontend.parsing.formats import recognition
from quire.frontend.parsing.formats.harmony import Harmony
from quire.frontend.parsing.formats.tool_formats import TOOL_FORMATS
from quire.frontend.parsing.shapes.call_shape import CallShape
from quire.frontend.parsing.tools import Tool, ToolChoice
from tests.frontend.parsing.rendered_calls import render
from tests.frontend.parsing.tool_samples import CALLS, HANDWRITTEN, TOOLS

FORMATS = [*TOOL_FORMATS, "openai"]


class Parsed(NamedTuple):
    """An answer, joined."""

    text: str
    reasoning: str
    calls: list[tuple[str, str]]  # name, arguments


def parse(parsers: OutputParsers, pieces: list[str], **options: Any) -> Parsed:
    """Pushes the pieces, and checks the order of events on the way."""
    end = options.pop("end", "model")
    parser = parsers.open(options.pop("tools", TOOLS), **options)
    assert parser is not None
    events: list[Event] = []
    for piece in pieces:
        events += parser.push(piece)
    events += parser.finish(end)
    text, reasoning, calls, is_open = "", "", [], False
    for event in events:
        match event:
            case TextDelta(text=more):
                assert more
                assert not is_open
                text += more
            case ReasoningDelta(text=more):
                assert more
                assert not is_open
                reasoning += more
            case ToolCallStart(index=index, id=call_id, name=name):
                assert index == len(calls)
                assert call_id
                assert not is_open
                calls.append((name, ""))
                is_open = True
            case ToolCallArguments(index=index, text=more):
                assert is_open
                assert index == len(calls) - 1
                calls[-1] = (calls[-1][0], calls[-1][1] + more)
            case ToolCallEnd(index=index):
                assert is_open
                assert index == len(calls) - 1
                is_open = False
    assert not is_open
    assert parser.num_tool_calls == len(calls)
    return Parsed(text, reasoning, calls)


def decoded(parsed: Parsed) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in parsed.calls]


def wrap(name: str, body: str, before: str, after: str) -> str:
    """`body` between other texts, in this format."""
    if name != "openai":
        return f"{before}{body}{after}"
    final = "<|start|>assistant<|channel|>final<|message|>"
    return f"<|channel|>commentary<|message|>{before}<|end|>{body}{final}{after}<|return|>"


def chunkings(text: str, count: int) -> list[list[str]]:
    """`text` cut at random places: with one cut, more cuts, or a cut between any two characters."""
    rng = random.Random(len(text))
    result = []
    for index in range(count):
        num_cuts = min(len(text) - 1, 1 + index * len(text) // count)
        cuts = [0, *sorted(rng.sample(range(1, len(text)), num_cuts)), len(text)]
        result.append([text[start:end] for start, end in pairwise(cuts)])
    return result


def test_every_format_has_a_handwritten_sample():
    assert {name for name, *_ in HANDWRITTEN} == set(FORMATS)


def test_names_are_those_of_vllm():
    expected = """
    apertus beam cohere_command3 cohere_command4 deepseek_v3 deepseek_v31 deepseek_v32 deepseek_v4 deepseek_v41 dots
    ernie45 functiongemma gemma4 gigachat3 glm45 glm47 granite granite-20b-fc granite4 hermes hf hunyuan_a13b hy_v3
    hy_v4 internlm jamba k2_horizon kimi_k2 kimi_k3 lfm2 ling3 llama3_json llama4_json llama4_pythonic longcat
    mimo minicpm5 minimax minimax_m2 minimax_m3 mistral muse muse_glimmer musespark1x olmo3 openai phi4_mini_json
    plamo3 poolside_v1 pythonic qwen3_coder qwen3_json qwen3_xml seed_oss step3 step3p5 step5 xlam
    """
    assert not set(expected.split()) - set(tool_parser_names())
    assert all(find_tool_parser(name) is not None for name in tool_parser_names() if name not in ("hf", "beam"))


@pytest.mark.parametrize(("name", "text", "calls", "content"), HANDWRITTEN, ids=[name for name, *_ in HANDWRITTEN])
def test_reads_what_models_write(name: str, text: str, calls: list[Any], content: str):
    parsers = OutputParsers(name)
    whole = parse(parsers, [text])
    assert decoded(whole) == calls
    assert whole.text == content


@pytest.mark.parametrize("name", FORMATS)
def test_calls_between_texts_are_read(name: str):
    text = wrap(name, render(find_tool_parser(name), CALLS), "Let me look: {1}, [2].\n", "\nDone < so far.")
    whole = parse(OutputParsers(name), [text])
    assert decoded(whole) == CALLS
    assert whole.text == "Let me look: {1}, [2].\nDone < so far."


@pytest.mark.parametrize("name", FORMATS)
def test_one_call_alone_is_read(name: str):
    for call in CALLS:
        parsed = parse(OutputParsers(name), [render(find_tool_parser(name), [call])])
        assert decoded(parsed) == [call]
        assert not parsed.text


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_that_is_cut_short_loses_nothing_that_was_told(name: str):
    parsers = OutputParsers(name)
    text = render(find_tool_parser(name), CALLS)
    whole = parse(parsers, [text])
    for end in range(len(text)):
        parsed = parse(parsers, [text[:end]], end="limit")
        if end % 10 == 0:
            assert parsed == parse(parsers, list(text[:end]), end="limit")
        for (got_name, got), (expected_name, expected) in zip(parsed.calls, whole.calls, strict=False):
            assert got_name == expected_name
            assert expected.startswith(got.rstrip("}"))


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "openai"])
@pytest.mark.parametrize("body", ["nonsense", " {nonsense}", "[1, 2]", '{"nome": 5}', "", '{"name": ""}', "f(1)", "\n"])
def test_what_is_no_call_is_content(name: str, body: str):
    parsers = OutputParsers(name)
    for trigger in TOOL_FORMATS[name].triggers:
        text = f"Before {trigger}{body} after <b>that</b>."
        parsed = parse(parsers, [text])
        assert parsed == Parsed(text, "", [])
        assert parse(parsers, list(text)) == parsed


@pytest.mark.parametrize("name", FORMATS)
def test_plain_text_passes_unchanged(name: str):
    text = '  Dear all,\n\n\tif a < b & c > d, then "x" isn\'t y… ```py\nprint({1: [2]})\n``` and {"a": 1}. \n\n'
    assert parse(OutputParsers(name), [text]) == Parsed(text, "", [])
    assert parse(OutputParsers(name), list(text)) == Parsed(text, "", [])


def vocabulary(name: str) -> list[str]:
    """Words that lead a parser into all its states."""
    form = find_tool_parser(name)
    words = ["{", "}", "[", "]", '"', "\\", ",", ":", "=", "(", ")", "<", ">", "/", "\n", " ", "x", "7", "'", "é"]
    words += ['{"name": "ping", "', 'arguments": {', "ping", "get_weather", 'city="', "a=", "functions.ping:0", "null"]
    return [*words, *form.markers, *("" if isinstance(form, Harmony) else form.triggers)]


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=30, deadline=None, database=None)
@given(data=st.data())
def test_no_text_breaks_a_parser(name: str, data: st.DataObject):
    words = st.sampled_from(vocabulary(name)) | st.text(max_size=5)
    pieces = [piece for piece in data.draw(st.lists(words, max_size=30)) if piece]
    parsers = OutputParsers(name)
    assert parse(parsers, pieces) == parse(parsers, ["".join(pieces)]) == parse(parsers, list("".join(pieces)))


@settings(max_examples=30, deadline=None, database=None)
@given(text=st.text(st.characters(exclude_characters="<[{`f", exclude_categories=("Cs",))))
def test_text_without_markup_is_the_answer(text: str):
    for name in FORMATS:
        assert parse(OutputParsers(name), [text]).text == text


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "pythonic"])
def test_long_arguments_are_read_in_pieces(name: str):
    note = 'line {"a": [1]}\n' * 10_000
    text = render(find_tool_parser(name), [("book_trip", {"note": note})])
    pieces = [text[start : start + 3] for start in range(0, len(text), 3)]
    assert decoded(parse(OutputParsers(name), pieces)) == [("book_trip", {"note": note})]


@pytest.mark.parametrize("name", ["hermes", "glm45", "pythonic", "functiongemma", "mistral"])
def test_arguments_stream_while_they_are_written(name: str):
    text = render(find_tool_parser(name), [("book_trip", {"note": "word " * 50})])
    parser = OutputParsers(name).open(TOOLS)
    assert parser is not None
    events = [event for piece in text[: len(text) // 2] for event in parser.push(piece)]
    assert isinstance(events[0], ToolCallStart)
    assert "word word word" in "".join(event.text for event in events[1:] if isinstance(event, ToolCallArguments))


# -------------------------------------------------------------------------------------------------------------- types


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "integer"}, " 5 ", 5),
        ({"type": "integer"}, "5.0", 5),
        ({"type": "integer"}, "five", "five"),
        ({"type": "number"}, "1e3", 1000.0),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "integer"}, "018", 18),
        ({"type": "uint"}, "+7", 7),
        ({"type": "double"}, ".5", 0.5),
        ({"type": "varchar"}, "7", "7"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "0", False),
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "None", None),
        ({"type": "object"}, "{'a': [True, None]}", {"a": [True, None]}),
        ({"type": "array"}, '["x"]', ["x"]),
        ({"type": "array"}, "[x", "[x"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"$ref": "#/$defs/N"}, "7", 7),
        ({"$ref": "#/$defs/Loop"}, "seven", "seven"),
        (None, "7", 7),
        (None, "seven", "seven"),
        (None, '{"a": 1}', {"a": 1}),
    ],
)
def test_text_becomes_what_the_schema_asks_for(schema: dict[str, Any] | None, text: str, value: Any):
    properties = {"x": schema} if schema is not None else {}
    definitions = {"N": {"type": "integer"}, "Loop": {"$ref": "#/$defs/Loop"}}
    tool = Tool(name="f", parameters={"type": "object", "properties": properties, "$defs": definitions})
    answer = f"<tool_call>f<arg_key>x</arg_key><arg_value>{text}</arg_value></tool_call>"
    assert decoded(parse(OutputParsers("glm45"), [answer], tools=[tool])) == [("f", {"x": value})]


TRIP = Tool(
    name="f",
    parameters={
        "type": "object",
        "properties": {
            "x": {"type": "integer"},
            "on": {"type": "boolean"},
            "note": {"type": "string"},
            "legs": {"type": "array", "items": {"$ref": "#/$defs/Leg"}},
        },
        "$defs": {"Leg": {"type": "object", "properties": {"day": {"type": "integer"}}}},
    },
)


def dsml(name: str, *parameters: tuple[str, str, str]) -> str:
    """A call in DeepSeek's notation; each parameter is its name, whether it is a string, and its text."""
    space, block = (" ", "calls") if name == "deepseek_v41" else ("", "tool_calls")
    block = "function_calls" if name == "deepseek_v32" else block
    lines = [
        f'<｜DSML｜{space}parameter name="{key}" string="{string}">{text}</｜DSML｜{space}parameter>\n'
        for key, string, text in parameters
    ]
    call = f'<｜DSML｜{space}invoke name="f">\n{"".join(lines)}</｜DSML｜{space}invoke>\n'
    return f"<｜DSML｜{space}{block}>\n{call}</｜DSML｜{space}{block}>"


@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v4", "deepseek_v41"])
@pytest.mark.parametrize(
    ("parameters", "arguments"),
    [
        ([("x", "false", "42")], {"x": 42}),
        ([("x", "true", "42")], {"x": 42}),
        ([("x", "true", "soon")], {"x": "soon"}),
        ([("on", "true", "true"), ("note", "true", "42")], {"on": True, "note": "42"}),
        ([("note", "false", "42")], {"note": "42"}),
        ([("note", "false", '"a\\nb"')], {"note": "a\nb"}),
        ([("legs", "false", '[{"day": "3"}, {"day": 4}]')], {"legs": [{"day": 3}, {"day": 4}]}),
        ([("other", "false", "{}"), ("more", "true", "7")], {"other": {}, "more": "7"}),
        ([("arguments", "false", '{"x": "42", "note": "}"}')], {"x": 42, "note": "}"}),
        ([("input", "true", '{"x": 1}')], {"x": 1}),
        ([("arguments", "false", "{}")], {}),
        ([("arguments", "false", '{"y": 1}')], {"arguments": {"y": 1}}),
        ([("arguments", "false", '{"x": 1}'), ("x", "false", "2")], {"arguments": {"x": 1}, "x": 2}),
        ([("x", "false", "2"), ("arguments", "false", '{"x": 1}')], {"x": 2, "arguments": {"x": 1}}),
        ([("arguments", "true", "all of <them>")], {"arguments": "all of <them>"}),
    ],
)
def test_deepseeks_arguments_have_the_types_of_the_schema(name: str, parameters: list[Any], arguments: dict[str, Any]):
    text = dsml(name, *parameters)
    parsers = OutputParsers(name)
    assert decoded(parse(parsers, [text], tools=[TRIP])) == [("f", arguments)]
    assert parse(parsers, list(text), tools=[TRIP]) == parse(parsers, [text], tools=[TRIP])


def test_a_parameter_that_is_named_like_a_wrapper_is_none():
    tool = Tool(name="f", parameters={"type": "object", "properties": {"arguments": {"type": "object"}}})
    text = dsml("deepseek_v4", ("arguments", "false", '{"x": 1}'))
    assert decoded(parse(OutputParsers("deepseek_v4"), [text], tools=[tool])) == [("f", {"arguments": {"x": 1}})]


def test_a_section_with_a_misspelt_mark_is_read():
    text = dsml("deepseek_v4", ("x", "false", "1")).replace("tool_calls>", "toolcalls>")
    assert parse(OutputParsers("deepseek_v4"), [text], tools=[TRIP]) == Parsed("", "", [("f", '{"x": 1}')])


@pytest.mark.parametrize("parameters", [None, {}, {"properties": 5}, {"properties": {"x": []}}, {"type": 3}])
def test_odd_schemas_are_harmless(parameters: dict[str, Any] | None):
    answer = "<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>"
    tools = [Tool(name="f", parameters=parameters)]
    assert decoded(parse(OutputParsers("glm45"), [answer], tools=tools)) == [("f", {"x": 1})]


# ------------------------------------------------------------------------------------------------------------ choices


def test_only_requests_with_tools_are_parsed():
    parsers = OutputParsers("hermes")
    assert parsers.open() is None
    assert parsers.open(TOOLS, ToolChoice(mode="none")) is None
    assert OutputParsers("hermes", auto_tools=False).open(TOOLS) is None
    assert OutputParsers().open(TOOLS) is None
    assert parsers.open(TOOLS) is not None


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_is_complete_with_the_calls_that_may_be_made(name: str):
    text = wrap(name, render(find_tool_parser(name), CALLS), "Now. ", "Done.")
    for max_calls in (1, 2):
        for chunks in ([text], list(text)):
            parser = OutputParsers(name, "openai_gptoss" if name == "openai" else None).open(
                TOOLS, ToolChoice(max_calls=max_calls)
            )
            assert parser is not None
            told, complete_after = [], 0
            for index, chunk in enumerate(chunks):
                told += parser.push(chunk)
                assert parser.is_complete is (ToolCallEnd(max_calls - 1) in told)
                complete_after = complete_after or parser.is_complete * (index + 1)
            assert told[-1] == ToolCallEnd(max_calls - 1), "neither calls nor text after them"
            assert parser.finish() == []
            assert parser.num_tool_calls == max_calls
            assert len(chunks) == 1 or complete_after < len(text) - len("Done.")


def test_markers_are_those_of_what_is_looked_for():
    parsers = OutputParsers("hermes", "qwen3")
    assert set(parsers.markers()) == {"<think>", "</think>"}
    assert set(parsers.markers(TOOLS)) == {"<think>", "</think>", "<tool_call>", "</tool_call>"}
    assert set(parsers.markers(TOOLS, ToolChoice(mode="none"))) == {"<think>", "</think>"}
    assert OutputParsers().markers(TOOLS) == ()


@pytest.mark.parametrize("name", FORMATS)
def test_markers_hold_every_mark_of_a_format(name: str):
    """Otherwise the markers that are special tokens would be missing from the parser's text."""
    form = find_tool_parser(name)
    assert isinstance(form, CallShape | Harmony)
    text = render(form, [("ping", {"a": "b", "c": [{"d": "e"}]}), ("pong", {})])
    for marker in sorted(form.markers, key=len, reverse=True):
        text = text.replace(marker, " ")
    assert not re.search(r"<[^<>]*>|\[[A-Z_]+\]", text)


def test_call_ids_have_the_format_that_the_model_expects():
    def first_id(name: str, prefix: str = "call_") -> str:
        parser = OutputParsers(name).open(TOOLS, call_prefix=prefix)
        assert parser is not None
        events = parser.push(render(TOOL_FORMATS[name], [CALLS[2], CALLS[2]]))
        ids = [event.id for event in events if isinstance(event, ToolCallStart)]
        assert len(set(ids)) == 2
        return ids[0]

    assert first_id("hermes", "chatcmpl-tool-").startswith("chatcmpl-tool-")
    assert first_id("hermes", "toolu_").startswith("toolu_")
    assert first_id("kimi_k2") == "functions.ping:0"
    assert len(first_id("mistral")) == 9
    assert first_id("mistral").isalnum()


def test_ids_that_others_made_up_become_such_as_mistrals_templates_accept():
    calls = [{"id": "toolu_01A", "function": {"name": "f"}}, {"id": "abc123DEF"}, {"id": "call_1"}, {}, None]
    results = [{"role": "tool", "tool_call_id": call_id} for call_id in ("toolu_01A", "abc123DEF", "call_1")]
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": calls}, *results]
    user, turn, *answers = OutputParsers("mistral").readable(messages)
    ids = [call["id"] for call in turn["tool_calls"][:3]]
    assert all(len(each) == 9 and each.isalnum() and each.isascii() for each in ids)
    assert len(set(ids)) == 3
    assert ids == [answer["tool_call_id"] for answer in answers]
    assert (ids[1], turn["tool_calls"][3:], user) == ("abc123DEF", [{}, None], messages[0])
    assert calls[0] == {"id": "toolu_01A", "function": {"name": "f"}}, "the caller's messages are left as they were"
    assert OutputParsers("hermes").readable(messages) is messages


@pytest.mark.parametrize("name", [None, "hermes", "pythonic"])
def test_required_calls_come_as_json_where_the_format_has_no_grammar(name: str | None):
    parsers = OutputParsers(name)
    choice = ToolChoice(mode="required")
    constraint = parsers.constraint(TOOLS, choice)
    assert constraint is not None
    if name == "hermes":
        assert constraint.structural_tag is not None
        return
    assert constraint.json_schema is not None
    text = json.dumps([{"name": name, "parameters": arguments} for name, arguments in CALLS])
    assert decoded(parse(parsers, list(text), choice=choice)) == CALLS


def test_a_named_call_comes_as_its_arguments_where_the_format_has_no_grammar():
    choice = ToolChoice(mode="named", name="book_trip")
    parsers = OutputParsers()
    constraint = parsers.constraint(TOOLS, choice)
    assert constraint is not None
    assert constraint.json_schema == TOOLS[1].parameters
    assert decoded(parse(parsers, list(json.dumps(CALLS[1][1])), choice=choice)) == [CALLS[1]]


# ------------------------------------------------------------------------------------------------------------ plugins

PLUGIN = """
from quire.frontend.parsing.events import TextDelta, ToolCallArguments, ToolCallEnd, ToolCallStart
from quire.frontend.parsing.plugins import ToolParser

class Shouting(ToolParser):
    name = "shouting"
    markers = ("<|shout|>",)

    def push(self, text):
        if not text.isupper():
            return [TextDelta(text)]
        return [ToolCallStart(0, "id-1", text.lower()), ToolCallArguments(0, "{}"), ToolCallEnd(0)]
"""


def test_a_plugin_adds_a_parser(tmp_path):
    path = tmp_path / "shouting.py"
    path.write_text(PLUGIN)
    parsers = OutputParsers("shouting", tool_plugin=str(path))
    assert parsers.markers() == ()
    assert parsers.markers(TOOLS) == ("<|shout|>",)
    assert parse(parsers, ["so: ", "PING", "PING"]) == Parsed("so:", "", [("ping", "{}"), ("ping", "{}")])
    assert OutputParsers("hermes", tool_plugin=str(path)).open(TOOLS) is not None


@pytest.mark.parametrize("source", [None, "1 / 0", "x = 1"])
def test_a_plugin_that_adds_none_is_refused(tmp_path, source: str | None):
    path = tmp_path / "plugin.py"
    if source is not None:
        path.write_text(source)
    with pytest.raises(ConfigError, match=r"--tool-parser-plugin.*plugin\.py"):
        OutputParsers("shouting", tool_plugin=str(path))


def test_a_plugin_without_its_method_is_refused(tmp_path):
    path = tmp_path / "plugin.py"
    path.write_text(PLUGIN.partition("    def push")[0])
    with pytest.raises(ConfigError, match=r"--tool-parser-plugin: Shouting in .* does not define push"):
        OutputParsers("hermes", tool_plugin=str(path))


def test_an_unknown_parser_is_refused_with_the_names_there_are():
    with pytest.raises(ConfigError, match=r"--tool-call-parser.*'hermess'.*hermes, "):
        OutputParsers("hermess")
    with pytest.raises(ConfigError, match="neither goes with another"):
        OutputParsers("openai", "qwen3")


def test_the_server_checks_its_parsers_at_start():
    with pytest.raises(ConfigError, match=r"--enable-auto-tool-choice: .*--tool-call-parser with one of .*hermes"):
        ServerConfig(enable_auto_tool_choice=True).with_defaults(ServingDefaults(), "{{ messages }}")
    with pytest.raises(ConfigError, match=r"--tool-call-parser.*hermes"):
        ServerConfig(tool_call_parser="hermess")
    with pytest.raises(ConfigError, match=r"--reasoning-parser.*qwen3"):
        OutputParsers(None, "qwen")
    with pytest.raises(ConfigError, match=r"--reasoning-parser-plugin.*no file"):
        OutputParsers(None, "qwen3", reasoning_plugin="/nowhere.py")
    reasoning = ReasoningConfig(reasoning_parser="qwen3")
    assert not ServerConfig(tool_call_parser="hermes").make_output_parsers(reasoning).finds_calls
    server = ServerConfig(tool_call_parser="hermes", enable_auto_tool_choice=True)
    assert server.make_output_parsers(reasoning).finds_calls


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ('<tool_call>\n{"name": <name>, "arguments": <args>}\n</tool_call>', "hermes"),
        ("<tool_call>\n<function=name>\n<parameter=key>", "qwen3_coder"),
        ("<tool_call>{name}<arg_key>{key}</arg_key>", "glm45"),
        ("{{- '[TOOL_CALLS][' }}", "mistral"),
        ('Environment: ipython {"name": name, "parameters": {}}', "llama3_json"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>name\n```json", "deepseek_v3"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>name<｜tool▁sep｜>", "deepseek_v31"),
        ("<|start|>assistant<|channel|>commentary to=functions.x<|message|>{}<|call|>", "openai"),
    ],
)
def test_a_template_shows_the_form_of_calls(template: str, name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="quire"):
        config = ServerConfig(enable_auto_tool_choice=True).with_defaults(ServingDefaults(), template)
    assert config.tool_call_parser == name
    assert f"read as {name}, by the chat template" in caplog.text
    assert ServerConfig().with_defaults(ServingDefaults(), template).tool_call_parser is None
    named = ServingDefaults(tool_call_parser="jamba")
    assert ServerConfig(enable_auto_tool_choice=True).with_defaults(named, template).tool_call_parser == "jamba"


def test_every_recognized_parser_exists() -> None:
    assert {name for name, _ in recognition._MARKS} <= {*tool_parser_names()}
