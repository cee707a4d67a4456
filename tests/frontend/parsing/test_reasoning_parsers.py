"""Reasoning parsers: reasoning is found however the text is cut, whether the prompt or the model opened it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.errors import ConfigError
from quire.frontend.parsing.answers.parsers import OutputParsers
from quire.frontend.parsing.answers.registry import find_reasoning_parser, find_tool_parser, reasoning_parser_names
from quire.frontend.parsing.formats.reasoning_formats import REASONING_FORMATS
from tests.frontend.parsing.rendered_calls import render
from tests.frontend.parsing.test_tool_parsers import CALLS, Parsed, chunkings, decoded, parse
from tests.frontend.parsing.tool_samples import TOOLS

THOUGHT = "First, 2 < 3 & {x}.\n\nThen — ½ <b>bold</b>."
ANSWER = "The answer:\n\n**4** </b>"

HANDWRITTEN = [
    ("cohere_command3", "<|START_THINKING|>H<co>m</co: 0:[1]>.<|END_THINKING|><|START_RESPONSE|>Hello<co>!</co: 1:[1]>"
     "<|END_RESPONSE|>", "Hm.", "Hello!"),
    ("cohere_command3", "<|START_RESPONSE|>Hello!<|END_RESPONSE|>", "", "Hello!"),
    ("cohere_command3", "Hello!", "", "Hello!"),
    ("cohere_command4", "Hm.<|END_THINKING|><|START_TEXT|>Hello!<|END_TEXT|>\n", "Hm.", "Hello!"),
    ("cohere_command4", "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Hello!<|END_RESPONSE|>", "Hm.",
     "Hello!"),
    ("deepseek_r1", "Okay, so\n</think>\n\nHello!", "Okay, so", "Hello!"),
    ("deepseek_r1", "<think>\nOkay, so\n</think>\n\nHello!", "Okay, so", "Hello!"),
    ("deepseek_r1", "Okay, so the ans", "Okay, so the ans", ""),
    ("deepseek_v3", "Hello!", "", "Hello!"),
    ("deepseek_v4", "<think>Hm.</think>Hello!", "Hm.", "Hello!"),
    ("deepseek_v41", "<think>Hm.</think>Hello!", "Hm.", "Hello!"),
    ("ernie45", "Hm.\n</think>\n\n<response>\nHello!\n</response>\n", "Hm.", "Hello!"),
    ("ernie45", "Hm.\n</think>\nHello!", "Hm.", "Hello!"),
    ("gemma4", "<|channel>thought\nHm.<channel|>Hello!", "Hm.", "Hello!"),
    ("gemma4", "thought\nHm.<channel|>Hello!", "Hm.", "Hello!"),
    ("gemma4", "Hello, <channel|>you!", "", "Hello, <channel|>you!"),
    ("glm45", "\n<think>Hm.</think>\nHello!", "Hm.", "Hello!"),
    ("granite", "Here is my thought process: Hm. Here is my response: Hello!", "Hm.", "Hello!"),
    ("granite", "Here's my thought process:\nHm.\nHere's my response:\nHello!", "Hm.", "Hello!"),
    ("granite", "Here is my response to you.", "", "Here is my response to you."),
    ("holo2", "Hm.</think>Hello!", "Hm.", "Hello!"),
    ("hunyuan_a13b", "<think>\nHm.\n</think>\n<answer>\nHello!\n</answer>", "Hm.", "Hello!"),
    ("hy_v3", "<think>Hm.</think>Hello!", "Hm.", "Hello!"),
    ("hy_v4", "<think>Hm.</think>Hello!", "Hm.", "Hello!"),
    ("k2_horizon", "Hm.</ifm|think>Hello!", "Hm.", "Hello!"),
    ("k2_horizon", "<ifm|think_fast>Hm.</ifm|think_fast>Hello!", "Hm.", "Hello!"),
    ("kimi_k3", "<|open|>think<|sep|>Hm.<|close|>think<|sep|><|open|>response<|sep|>Hello!<|close|>response<|sep|>"
     "<|close|>message<|sep|>", "Hm.", "Hello!"),
    ("kimi_k3", "Hello!<|close|>response<|sep|><|close|>message<|sep|>", "", "Hello!"),
    ("minicpmv", "<think><reserved_12>A\\nb</think><|reserved_13|>`a\\n` $\\nu$ a\\\\n c\\r\\nd\\<|im_end|>", "A\nb",
     "`a\\n` $\\nu$ a\\\\n c\nd\\"),
    ("minimax_m2_append_think", "Hm.\n</think>\n\nHello!", "", "<think>Hm.\n</think>\n\nHello!"),
    ("minimax_m3", "<mm:think>Hm.</mm:think>Hello!", "Hm.", "Hello!"),
    ("minimax_m3", "</mm:think>Hello!", "", "Hello!"),
    ("muse_glimmer", " to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Hello!<|eot|>",
     "Hm.", "Hello!"),
    ("muse_glimmer", " to=self<|message|>Hm, to=5. to=user<|message|>Hello!<|eot|>", "Hm, to=5.", "Hello!"),
    ("muse_glimmer", " <|message|>Hello!", "", "Hello!"),
    ("muse", "<|message|>Hm.<|eom|><|start|>assistant to=commentary<|message|>Wait.<|eom|><|start|>assistant "
     "to=developer<|message|>Hidden.<|eom|><|start|>assistant to=user<|message|>Hello!<|eot|>", "Hm.", "Wait.Hello!"),
    ("muse_glimmer", " Hello!", "", " Hello!"),
    ("inkling", "<|content_thinking|>Hm.<|end_message|><|message_model|><|content_text|>Hello!<|end_message|>",
     "Hm.", "Hello!"),
    ("inkling", "Hello!<|content_model_end_sampling|>", "", "Hello!"),
    ("kimi_k2", "<think>Hm.</think>Hello!", "Hm.", "Hello!"),
    ("minimax_m2", "Hm.\n</think>\n\nHello!", "Hm.", "Hello!"),
    ("mistral", "[THINK]Hm.[/THINK]Hello!", "Hm.", "Hello!"),
    ("mistral", "Well. [THINK]Hm.[/THINK] Hello!", "Hm.", "Well. Hello!"),
    ("nemotron_v3", "Hm.</think>Hello!", "Hm.", "Hello!"),
    ("olmo3", "Hm.</think>Hello!", "Hm.", "Hello!"),
    ("openai_gptoss", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello!",
     "Hm.", "Hello!"),
    ("openai_gptoss", "Hello!", "", "Hello!"),
    ("openai_gptoss", "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>analysis<|message|>B<|end|>"
     "<|start|>assistant<|channel|>commentary<|message|>C<|end|><|start|>assistant<|channel|>final<|message|>D",
     "A\nB", "C\nD"),
    ("plamo3", "<|plamo:begin_think:plamo|>Hm.<|plamo:end_think:plamo|>Hello!<|plamo:tag|>", "Hm.", "Hello!"),
    ("qwen3", "<think>Hm.</think>Hello</think>!", "Hm.", "Hello</think>!"),
    ("qwen3", "\n</think>\n\nHello!", "", "Hello!"),
    ("qwen3", "<think>\nHm.\n</think>\n\nHello!", "Hm.", "Hello!"),
    ("qwen3", "Hello! I write <think> at times.", "", "Hello! I write <think> at times."),
    ("seed_oss", "<seed:think>Hm.</seed:think>Hello!", "Hm.", "Hello!"),
    ("step3", "Hm.\n</think>\nHello!", "Hm.", "Hello!"),
    ("step3p5", "Hm.\n</think>\nHello!", "Hm.", "Hello!"),
]  # fmt: skip
FORMATS = [*REASONING_FORMATS, "openai_gptoss", "inkling", "muse", "muse_glimmer"]
KEEPING = "minimax_m2_append_think"


def written(name: str, thought: str, answer: str) -> str:
    """An answer in this format."""
    if name == "openai_gptoss":
        final = f"<|start|>assistant<|channel|>final<|message|>{answer}<|return|>"
        return f"<|channel|>analysis<|message|>{thought}<|end|>{final}"
    if name == "inkling":
        blocks = (f"<|content_thinking|>{thought}<|end_message|>", f"<|content_text|>{answer}<|end_message|>")
        return "<|message_model|>".join(blocks)
    if name in ("muse", "muse_glimmer"):
        return f" to=self<|message|>{thought}<|eom|><|start|>assistant to=user<|message|>{answer}<|eot|>"
    form = REASONING_FORMATS[name]
    begin, end = form.answers[0] if form.answers else ("", "")
    return f"{form.begin[0]}\n{thought}\n{form.end[0]}\n\n{begin}{answer}{end}"


def test_every_format_has_a_handwritten_sample():
    assert {name for name, *_ in HANDWRITTEN} == {*FORMATS, KEEPING}


def test_names_are_those_of_vllm():
    expected = """
    beam cohere_command3 cohere_command4 deepseek_r1 deepseek_v3 deepseek_v4 deepseek_v41 ernie45 gemma4 glm45 glm47
    granite granite_thinking_parser hf holo2 hunyuan_a13b hy_v3 hy_v4 identity k2_horizon kimi_k2 kimi_k3 ling3
    mimo minicpmv minimax_m2 minimax_m2_append_think minimax_m3 mistral muse muse_glimmer musespark1x nemotron_v3
    olmo3 openai_gptoss plamo3 poolside_v1 qwen3 seed_oss step3 step3p5 step5
    """
    assert not set(expected.split()) - set(reasoning_parser_names())
    assert all(
        find_reasoning_parser(name) is not None for name in set(reasoning_parser_names()) - {"hf", "beam", "identity"}
    )
    with pytest.raises(ConfigError, match=r"--reasoning-parser.*'qwen'.*qwen3"):
        OutputParsers(reasoning_parser="qwen")


@pytest.mark.parametrize(("name", "text", "reasoning", "content"), HANDWRITTEN)
def test_reads_what_models_write(name: str, text: str, reasoning: str, content: str):
    parsers = OutputParsers(reasoning_parser=name)
    assert parse(parsers, [text]) == Parsed(content, reasoning, [])


@pytest.mark.parametrize("name", FORMATS)
def test_reasoning_and_answer_are_told_apart(name: str):
    text = written(name, THOUGHT, ANSWER)
    assert parse(OutputParsers(reasoning_parser=name), [text]) == Parsed(ANSWER, THOUGHT, [])


@pytest.mark.parametrize("name", REASONING_FORMATS)
def test_the_prompt_may_have_opened_or_closed_reasoning(name: str):
    form = REASONING_FORMATS[name]
    parsers = OutputParsers(reasoning_parser=name)
    begin, end = form.begin[0], form.end[0]
    text = f"Hm.\n{end}\nHello!"
    opened = parse(parsers, [text], prompt_text=f"<|im_start|>assistant\n{begin}\n")
    assert opened == Parsed("Hello!", "Hm.", [])
    closed = parse(parsers, ["Hello!"], prompt_text=f"<|im_start|>assistant\n{begin}\n\n{end}\n\n")
    assert closed == Parsed("Hello!", "", [])


def test_identity_and_no_parser_cost_nothing():
    assert OutputParsers(reasoning_parser="identity").open() is None
    assert OutputParsers().open() is None


@pytest.mark.parametrize(
    ("reasoning", "tools"),
    [
        ("cohere_command3", "cohere_command3"), ("cohere_command4", "cohere_command4"),
        ("deepseek_v41", "deepseek_v41"), ("gemma4", "gemma4"), ("hy_v3", "hy_v3"), ("hy_v4", "hy_v4"),
        ("qwen3", "hermes"), ("deepseek_r1", "deepseek_v3"), ("deepseek_v3", "deepseek_v31"), ("glm45", "glm45"),
        ("kimi_k2", "kimi_k2"), ("mistral", "mistral"), ("minimax_m2", "minimax_m2"), ("seed_oss", "seed_oss"),
        ("hunyuan_a13b", "hunyuan_a13b"), ("ernie45", "ernie45"), ("step3", "step3"), ("openai_gptoss", "openai"),
    ],
)  # fmt: skip
def test_calls_follow_reasoning(reasoning: str, tools: str):
    parsers = OutputParsers(tools, reasoning)
    calls = render(find_tool_parser(tools), CALLS)
    if reasoning == "openai_gptoss":
        text = f"<|channel|>analysis<|message|>{THOUGHT}<|end|>{calls}"
    else:
        text = written(reasoning, THOUGHT, f"\n{calls}\n")
    whole = parse(parsers, [text])
    assert decoded(whole) == CALLS
    assert (whole.text.strip(), whole.reasoning) == ("", THOUGHT)
    for pieces in chunkings(text, 30):
        assert parse(parsers, pieces) == whole


@pytest.mark.parametrize(
    ("reasoning", "tools"),
    [
        ("cohere_command3", "cohere_command3"),
        ("deepseek_v41", "deepseek_v41"),
        ("gemma4", "gemma4"),
        ("hy_v4", "hy_v4"),
        ("qwen3", "hermes"),
        ("glm45", "glm45"),
        ("kimi_k2", "kimi_k2"),
        ("mistral", "mistral"),
        ("seed_oss", "seed_oss"),
        ("plamo3", "plamo3"),
    ],
)
def test_a_call_ends_reasoning_that_was_not_closed(reasoning: str, tools: str):
    text = f"{REASONING_FORMATS[reasoning].begin[0]}Hm.\n{render(find_tool_parser(tools), CALLS)}"
    parsed = parse(OutputParsers(tools, reasoning), list(text))
    assert (decoded(parsed), parsed.text, parsed.reasoning) == (CALLS, "", "Hm.")
    without_tools = parse(OutputParsers(tools, reasoning), [text], tools=[])
    assert not without_tools.calls
    assert not without_tools.text


@pytest.mark.parametrize("name", ["qwen3", "glm45", "nemotron_v3"])
def test_a_mark_of_calls_that_reasoning_mentions_does_not_end_it(name: str):
    thought = "It would be `<tool_call>quoted</tool_call>`, or <tool_call>."
    if name == "glm45":  # whose calls begin with a name
        thought = "It would be `<tool_call>`."
    parsed = parse(OutputParsers("hermes", name), list(f"<think>{thought}</think>The answer is 42."))
    assert parsed == Parsed("The answer is 42.", thought, [])


def test_calls_that_reasoning_mentions_are_not_made():
    text = '<think>I could write <tool_call>{"name": "ping", "arguments": {}}</tool_call>.</think>No.'
    parsed = parse(OutputParsers("hermes", "deepseek_v3"), list(text))
    assert parsed.calls == []
    assert parsed.text == "No."


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=30, deadline=None, database=None)
@given(data=st.data())
def test_no_text_breaks_a_parser(name: str, data: st.DataObject):
    form = find_reasoning_parser(name)
    words = st.sampled_from(["\n", " ", "x", "<", "Here", *form.markers]) | st.text(max_size=5)  # type: ignore[union-attr]
    pieces = [piece for piece in data.draw(st.lists(words, max_size=20)) if piece]
    parsers = OutputParsers(reasoning_parser=name)
    assert parse(parsers, pieces) == parse(parsers, ["".join(pieces)]) == parse(parsers, list("".join(pieces)))


PLUGIN = """
from quire.frontend.parsing.events import ReasoningDelta, TextDelta
from quire.frontend.parsing.plugins import ReasoningParser

class Whisper(ReasoningParser):
    name = "whisper"

    def push(self, text):
        return [ReasoningDelta(text) if text == "hm" else TextDelta(text)]
"""


def test_a_plugin_adds_a_parser(tmp_path):
    path = tmp_path / "whisper.py"
    path.write_text(PLUGIN)
    parsers = OutputParsers("hermes", "whisper", reasoning_plugin=str(path))
    text = render(find_tool_parser("hermes"), CALLS[2:])
    parsed = parse(parsers, ["hm", "So: ", text], tools=TOOLS)
    assert (parsed.reasoning, parsed.text, decoded(parsed)) == ("hm", "So:", CALLS[2:])
