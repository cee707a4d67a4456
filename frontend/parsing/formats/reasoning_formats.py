"""Each model's markers of reasoning, by the name of its parser."""

from quire.frontend.parsing.formats.reasoning import ReasoningFormat

_ANGLE = "<tool_call>"
_HUNYUAN = ReasoningFormat(yields_to=("<tool_calls>",), suffixed=True)


def _cohere(*answers: tuple[str, str], opened: bool = False) -> ReasoningFormat:
    return ReasoningFormat(
        begin=("<|START_THINKING|>",),
        end=("<|END_THINKING|>",),
        opened=opened,
        answers=answers,
        yields_to=("<|START_ACTION|>",),
        cites=True,
    )


REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "cohere_command3": _cohere(("<|START_RESPONSE|>", "<|END_RESPONSE|>")),
    "cohere_command4": _cohere(
        ("<|START_TEXT|>", "<|END_TEXT|>"), ("<|START_RESPONSE|>", "<|END_RESPONSE|>"), opened=True
    ),
    "deepseek_r1": ReasoningFormat(opened=True),
    "deepseek_v3": ReasoningFormat(),
    "deepseek_v4": ReasoningFormat(yields_to=("<｜DSML｜tool_calls>",)),
    "deepseek_v41": ReasoningFormat(yields_to=("<｜DSML｜ calls>",)),
    "ernie45": ReasoningFormat(opened=True, answers=(("<response>", "</response>"),)),
    "gemma4": ReasoningFormat(
        begin=("<|channel>thought\n", "<|channel>"),
        end=("<channel|>",),
        first=("thought\n",),
        anywhere=True,
        yields_to=("<|tool_call>",),
        named=True,
    ),
    "glm45": ReasoningFormat(anywhere=True, yields_to=(_ANGLE,), named=True),
    "granite": ReasoningFormat(
        begin=("Here is my thought process:", "Here's my thought process:"),
        end=("Here is my response:", "Here's my response:"),
    ),
    "holo2": ReasoningFormat(opened=True),
    "hunyuan_a13b": ReasoningFormat(answers=(("<answer>", "</answer>"),)),
    "hy_v3": _HUNYUAN,
    "hy_v4": _HUNYUAN,
    "k2_horizon": ReasoningFormat(
        begin=("<ifm|think>", "<ifm|think_fast>", "<ifm|think_faster>"),
        end=("</ifm|think>", "</ifm|think_fast>", "</ifm|think_faster>"),
        opened=True,
        yields_to=("<ifm|tool_calls>",),
    ),
    "kimi_k2": ReasoningFormat(yields_to=("<|tool_calls_section_begin|>",)),
    "kimi_k3": ReasoningFormat(
        begin=("<|open|>think<|sep|>",),
        end=("<|close|>think<|sep|>",),
        yields_to=("<|open|>tools<|sep|>",),
        dropped=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ),
    "minicpmv": ReasoningFormat(
        yields_to=(_ANGLE,),
        dropped=(
            "<|im_end|>",
            *(f"<{bar}reserved_{index}{bar}>" for bar in ("", "|") for index in range(12, 16)),
        ),
        escaped_newlines=True,
    ),
    "minimax_m2": ReasoningFormat(opened=True, yields_to=("<minimax:tool_call>",)),
    "minimax_m3": ReasoningFormat(begin=("<mm:think>",), end=("</mm:think>",), anywhere=True),
    "mistral": ReasoningFormat(
        begin=("[THINK]", "<think>"),
        end=("[/THINK]", "</think>"),
        anywhere=True,
        yields_to=("[TOOL_CALLS]",),
        named=True,
    ),
    "nemotron_v3": ReasoningFormat(opened=True, yields_to=(_ANGLE,)),
    "olmo3": ReasoningFormat(opened=True),
    "plamo3": ReasoningFormat(
        begin=("<|plamo:begin_think:plamo|>",),
        end=("<|plamo:end_think:plamo|>", "<|plamo:tag|>"),
        yields_to=("<|plamo:begin_tool_requests:plamo|>",),
        dropped=("<|plamo:tag|>",),
    ),
    "qwen3": ReasoningFormat(yields_to=(_ANGLE,)),
    "seed_oss": ReasoningFormat(
        begin=("<seed:think>",),
        end=("</seed:think>",),
        yields_to=("<seed:tool_call>",),
    ),
    "step3": ReasoningFormat(opened=True),
    "step3p5": ReasoningFormat(opened=True, yields_to=(_ANGLE,)),
}
"""Formats by name, as in `--reasoning-parser`."""

REASONING_ALIASES = {
    "deepseek_v31": "deepseek_v3",
    "glm4_moe": "glm45",
    "glm47": "glm45",
    "gptoss": "openai_gptoss",
    "granite_thinking_parser": "nemotron_v3",
    "ling3": "glm45",
    "mimo": "qwen3",
    "musespark1x": "muse",
    "poolside_v1": "deepseek_v3",
    "seedoss": "seed_oss",
    "step5": "deepseek_r1",
}
