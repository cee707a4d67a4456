"""Each model's format of calls. One description serves both the parser and the grammar."""

from quire.frontend.parsing.formats import inkling
from quire.frontend.parsing.literals import ESCAPED, GEMMA4
from quire.frontend.parsing.shapes.attribute_calls import AttributeCalls, Tag
from quire.frontend.parsing.shapes.call_shape import CallShape
from quire.frontend.parsing.shapes.element_calls import ElementCalls
from quire.frontend.parsing.shapes.json_calls import JsonCalls
from quire.frontend.parsing.shapes.keyed_calls import KeyedCalls
from quire.frontend.parsing.shapes.named_calls import NamedCalls
from quire.frontend.parsing.shapes.python_calls import PythonCalls
from quire.frontend.parsing.shapes.xml_calls import XmlCalls

_HERMES = JsonCalls(begin=("<tool_call>",), end=("</tool_call>",), gap="\n")
_LLAMA = JsonCalls(begin=("<|python_tag|>",), bare=True, arguments_key="parameters", separator=";")
_COHERE = JsonCalls(
    begin=("<|START_ACTION|>",),
    end=("<|END_ACTION|>",),
    listed=True,
    name_key="tool_name",
    arguments_key="parameters",
    number_key="tool_call_id",
)
_DSML_KEY_ENDS = {'" string="true">': "string", '" string="false">': "json", '">': ""}


def _qwen_xml(begin: str, end: str, trim: str = "newline") -> XmlCalls:
    return XmlCalls(
        section=(begin, end),
        call_begin="<function=",
        name_end=">",
        call_end="</function>",
        key_begin="<parameter=",
        key_ends={">": ""},
        value_end="</parameter>",
        unclosed=True,
        trim=trim,
        gap="\n",
        style="qwen_xml",
    )


def _dsml(block: str, space: str = "", style: str = "deepseek_xml", misspelt: tuple[str, ...] = ()) -> XmlCalls:
    return XmlCalls(
        section=(f"<｜DSML｜{space}{block}>", f"</｜DSML｜{space}{block}>"),
        call_begin=f'<｜DSML｜{space}invoke name="',
        name_end='">',
        call_end=f"</｜DSML｜{space}invoke>",
        key_begin=f'<｜DSML｜{space}parameter name="',
        key_ends=_DSML_KEY_ENDS,
        value_end=f"</｜DSML｜{space}parameter>",
        wrappers=("arguments", "input"),
        misspelt=misspelt,
        unclosed=True,
        grouped=True,
        gap="\n",
        style=style,
    )


def _hunyuan(name_end: str, gap: str) -> XmlCalls:
    return XmlCalls(
        section=("<tool_calls>", "</tool_calls>"),
        call_begin="<tool_call>",
        name_end=name_end,
        call_end="</tool_call>",
        key_begin="<arg_key>",
        key_ends={"</arg_key>": ""},
        value_begin="<arg_value>",
        value_end="</arg_value>",
        grouped=True,
        gap=gap,
        style="glm_xml",
        suffixed=True,
    )


_K3_RESPONSE = {  # the answer, which may precede Kimi K3's calls; the prompt may have opened it
    "type": "optional",
    "content": {
        "type": "sequence",
        "elements": [
            {"type": "optional", "content": {"type": "const_string", "value": "<|open|>response<|sep|>"}},
            {
                "type": "tag",
                "begin": "",
                "content": {"type": "any_text", "excludes": ["<|open|>", "<|close|>"]},
                "end": "<|close|>response<|sep|>",
            },
        ],
    },
}

TOOL_FORMATS: dict[str, CallShape] = {
    "apertus": KeyedCalls(begin="<|tools_prefix|>", end="<|tools_suffix|>"),
    "cohere_command3": _COHERE,
    "cohere_command4": _COHERE,
    "deepseek_v3": NamedCalls(
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        call_begin="<｜tool▁call▁begin｜>",
        prefix="function<｜tool▁sep｜>",
        name_end="\n```json\n",
        arguments_end="\n```",
        separator="\n",
        call_end="<｜tool▁call▁end｜>",
    ),
    "deepseek_v31": NamedCalls(
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        call_begin="<｜tool▁call▁begin｜>",
        name_end="<｜tool▁sep｜>",
        call_end="<｜tool▁call▁end｜>",
    ),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls", misspelt=("<｜DSML｜toolcalls>", "<｜DSML｜tool>")),
    "deepseek_v41": _dsml("calls", " ", "deepseek_v4_1_xml"),
    "dots": XmlCalls(
        section=("<dots_function_call>", "</dots_function_call>"),
        call_begin='<invoke name="',
        name_end='">',
        call_end="</invoke>",
        key_begin='<parameter name="',
        key_ends={'">': ""},
        value_end="</parameter>",
        trim="space",
        grouped=True,
        gap="\n",
        style="minimax_xml",
        older=JsonCalls(begin=("<dots_function_call>",), end=("</dots_function_call>",)),
    ),
    "ernie45": _HERMES,
    "functiongemma": NamedCalls(
        call_begin="<start_function_call>", prefix="call:", call_end="<end_function_call>", notation=ESCAPED
    ),
    "gemma4": NamedCalls(
        call_begin="<|tool_call>", prefix="call:", prefix_end=":", call_end="<tool_call|>", notation=GEMMA4
    ),
    "gigachat3": JsonCalls(
        begin=("function call<|role_sep|>", "<|function_call|>"),
        end=("<|message_sep|>", "</s>"),
        gap="\n",
        dropped=("<|message_sep|>", "</s>"),
    ),
    "glm45": XmlCalls(
        call_begin="<tool_call>",
        call_end="</tool_call>",
        key_begin="<arg_key>",
        key_ends={"</arg_key>": ""},
        value_begin="<arg_value>",
        value_end="</arg_value>",
        style="glm_xml",
    ),
    "granite": JsonCalls(begin=("<|tool_call|>", "<tool_call>"), listed=True),
    "granite-20b-fc": JsonCalls(begin=("<function_call>",), gap=" "),
    "hermes": _HERMES,
    "hunyuan_a13b": JsonCalls(begin=("<tool_calls>",), end=("</tool_calls>",), listed=True),
    "hy_v3": _hunyuan("<tool_sep>", "\n"),
    "hy_v4": _hunyuan("", ""),
    "inkling": JsonCalls(
        begin=(inkling.CALL,), end=inkling.ENDS, arguments_key="args", separator=inkling.MODEL, dropped=inkling.ENDS
    ),
    "internlm": JsonCalls(
        begin=("<|action_start|><|plugin|>",), end=("<|action_end|>",), arguments_key="parameters", gap="\n"
    ),
    "jamba": JsonCalls(begin=("<tool_calls>",), end=("</tool_calls>",), listed=True),
    "k2_horizon": XmlCalls(
        section=("<ifm|tool_calls>", "</ifm|tool_calls>"),
        call_begin="<ifm|tool_call>",
        call_end="</ifm|tool_call>",
        key_begin="<ifm|arg_key>",
        key_ends={"</ifm|arg_key>": ""},
        type=("<ifm|arg_type>", "</ifm|arg_type>"),
        value_begin="<ifm|arg_value>",
        value_end="</ifm|arg_value>",
        grouped=True,
        json=JsonCalls(begin=("<ifm|tool_call>",), end=("</ifm|tool_call>",), typed=True),
    ),
    "kimi_k2": NamedCalls(
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        call_begin="<|tool_call_begin|>",
        name_end="<|tool_call_argument_begin|>",
        call_end="<|tool_call_end|>",
        indexed=True,
    ),
    "kimi_k3": AttributeCalls(
        section=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
        call=Tag("<|open|>call", "<|sep|>", "<|close|>call<|sep|>"),
        name="tool",
        number="index",
        argument=Tag("<|open|>argument", "<|sep|>", "<|close|>argument<|sep|>"),
        key="key",
        type="type",
        style="kimi_k3_xml",
        before=_K3_RESPONSE,
    ),
    "lfm2": PythonCalls(begin=("<|tool_call_start|>",), end=("<|tool_call_end|>",), echoed=True),
    "llama3_json": _LLAMA,
    "llama4_pythonic": PythonCalls(begin=("<|python_start|>",), end=("<|python_end|>",), bare=True),
    "longcat": JsonCalls(begin=("<longcat_tool_call>",), end=("</longcat_tool_call>",), gap="\n"),
    "mimo": _qwen_xml("<tool_call>", "</tool_call>", trim=""),
    "minicpm5": AttributeCalls(
        call=Tag("<function", ">", "</function>"),
        name="name",
        argument=Tag("<param", ">", "</param>"),
        key="name",
        gap="\n",
        offered=True,
        escaped=True,
    ),
    "minimax": JsonCalls(begin=("<tool_calls>",), end=("</tool_calls>",), gap="\n"),
    "minimax_m2": XmlCalls(
        section=("<minimax:tool_call>", "</minimax:tool_call>"),
        call_begin='<invoke name="',
        name_end='">',
        call_end="</invoke>",
        key_begin='<parameter name="',
        key_ends={'">': ""},
        value_end="</parameter>",
        unclosed=True,
        grouped=True,
        gap="\n",
        style="minimax_xml",
    ),
    "minimax_m3": ElementCalls(namespace="]<]minimax[>[", style="minimax_m3_xml"),
    "mistral": NamedCalls(
        call_begin="[TOOL_CALLS]",
        name_end="[ARGS]",
        name_end_optional=True,
        call_id="[CALL_ID]",
        older=JsonCalls(begin=("[TOOL_CALLS]",), listed=True),
    ),
    "muse_glimmer": AttributeCalls(
        section=("<atem:function_calls>", "</atem:function_calls>"),
        call=Tag("<atem:invoke", ">", "</atem:invoke>"),
        name="name",
        argument=Tag("<atem:parameter", ">", "</atem:parameter>"),
        key="name",
        gap="\n",
    ),
    "olmo3": PythonCalls(begin=("<function_calls>",), end=("</function_calls>",)),
    "phi4_mini_json": JsonCalls(begin=("functools",), listed=True),
    "plamo3": NamedCalls(
        section=("<|plamo:begin_tool_requests:plamo|>", "<|plamo:end_tool_requests:plamo|>"),
        call_begin="<|plamo:begin_tool_request:plamo|>",
        prefix="<|plamo:begin_tool_name:plamo|>",
        name_end="<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>",
        arguments_end="<|plamo:end_tool_arguments:plamo|>",
        call_end="<|plamo:end_tool_request:plamo|>",
        dropped=("<|plamo:tag|>",),
    ),
    "pythonic": PythonCalls(bare=True),
    "qwen3_coder": _qwen_xml("<tool_call>", "</tool_call>"),
    "seed_oss": _qwen_xml("<seed:tool_call>", "</seed:tool_call>"),
    "step3": XmlCalls(
        section=("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
        wrapper=("<｜tool_call_begin｜>function<｜tool_sep｜>", "<｜tool_call_end｜>"),
        call_begin='<steptml:invoke name="',
        name_end='">',
        call_end="</steptml:invoke>",
        key_begin='<steptml:parameter name="',
        key_ends={'">': ""},
        value_end="</steptml:parameter>",
        trim="space",
        grouped=True,
    ),
    "xlam": JsonCalls(
        begin=("```json", "```", "<tool_call>", "[TOOL_CALLS]"), end=("```", "</tool_call>"), bare=True, listed=True
    ),
}
"""Formats by name, as in `--tool-call-parser`."""

TOOL_ALIASES = {
    "glm4_moe": "glm45",
    "glm47": "glm45",
    "glm47_moe": "glm45",
    "granite4": "hermes",
    "ling3": "glm45",
    "llama": "llama3_json",
    "llama4_json": "llama3_json",
    "phi4mini": "phi4_mini_json",
    "muse": "muse_glimmer",
    "musespark1x": "muse_glimmer",
    "poolside_v1": "glm45",
    "qwen3_json": "hermes",
    "qwen3_xml": "qwen3_coder",
    "qwen3coder": "qwen3_coder",
    "qwen3xml": "qwen3_coder",
    "step3p5": "qwen3_coder",
    "step5": "qwen3_coder",
}
