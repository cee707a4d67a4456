"""Recognizes from a chat template how a model writes its calls."""

_MARKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("apertus", ("<|tools_prefix|>",)),
    ("cohere_command4", ("<|START_ACTION|>", "<|START_TEXT|>")),
    ("cohere_command3", ("<|START_ACTION|>",)),
    ("deepseek_v32", ("｜DSML｜", "function_calls")),
    ("deepseek_v41", ("｜DSML｜ calls",)),
    ("deepseek_v4", ("｜DSML｜", "tool_calls")),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    ("functiongemma", ("<start_function_call>",)),
    ("glm45", ("<arg_key>",)),
    ("granite", ("<|tool_call|>",)),
    ("inkling", ("<|content_invoke_tool_json|>",)),
    ("kimi_k3", ("<|open|>", "<|close|>")),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("longcat", ("<longcat_tool_call>",)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("openai", ("<|channel|>", "<|call|>")),
    ("seed_oss", ("<seed:tool_call>",)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("llama3_json", ("ipython", '"parameters": ')),
    ("hermes", ("<tool_call>",)),
)
"""Parsers with the marks that all stand in their models' templates; the first match counts."""


def recognize(template: str) -> str | None:
    """The name of the parser of tool calls for a model with this chat template; None if no known mark is in it."""
    return next((name for name, marks in _MARKS if all(mark in template for mark in marks)), None)
