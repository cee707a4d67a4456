"""Calls in each model's format, written by hand after the models' templates and cards."""

from quire.frontend.parsing.tools import Tool
from tests.frontend.parsing.rendered_calls import Call

_STOPS = {"type": "array", "items": {"anyOf": [{"type": "number"}, {"type": "array"}]}}
_LEG = {"type": "object", "properties": {"to": {"type": "string"}, "via": _STOPS}}
_DEEP = {"type": "object", "properties": {"er": {"type": "object", "properties": {"null": {"type": "null"}}}}}
_OPTIONS = {"type": "object", "properties": {"deep": _DEEP}}

TOOLS = [
    Tool(
        name="get_weather",
        parameters={
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "metric": {"type": "boolean"}},
        },
    ),
    Tool(
        name="book_trip",
        parameters={
            "type": "object",
            "properties": {
                "legs": {"type": "array", "items": {"$ref": "#/$defs/Leg"}},
                "options": {"anyOf": [_OPTIONS, {"type": "null"}]},
                "note": {"type": "string"},
            },
            "$defs": {"Leg": _LEG},
        },
    ),
    Tool(name="ping", parameters={"type": "object", "properties": {}}),
]

CALLS: list[Call] = [
    ("get_weather", {"city": "Zürich 🌧️ 東京", "days": 3, "metric": True}),
    (
        "book_trip",
        {
            "legs": [{"to": 'B]} "q"', "via": [1, -2.5, []]}, {"to": "</a> {"}],
            "options": {"deep": {"er": {"null": None}}},
            "note": '}]) \\ say "hi", it\'s\n\tfine {',
        },
    ),
    ("ping", {}),
]

_PARIS = ("get_weather", {"city": "Paris"})
_DAYS = ("get_weather", {"city": "Paris", "days": 3})

HANDWRITTEN: list[tuple[str, str, list[Call], str]] = [
    (
        "apertus",
        'Let me see. <|tools_prefix|>[{"get_weather": {"city": "Paris"}}, {"ping": {}}]<|tools_suffix|>',
        [_PARIS, ("ping", {})],
        "Let me see.",
    ),
    (
        "apertus",
        '<|tools_prefix|>[{"get_weather": {"city": "Paris", "days": 3}}, {"ping": null}]',
        [_DAYS, ("ping", {})],
        "",
    ),
    (
        "cohere_command3",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Paris"}},\n'
        '    {"tool_call_id": "1", "tool_name": "ping", "parameters": {}}\n]<|END_ACTION|>',
        [_PARIS, ("ping", {})],
        "",
    ),
    (
        "cohere_command4",
        'So:<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Paris", '
        '"days": 3}}]<|END_ACTION|>',
        [_DAYS],
        "So:",
    ),
    (
        "deepseek_v41",
        'Let me check.\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="get_weather">\n'
        '<｜DSML｜ parameter name="city" string="true">Paris</｜DSML｜ parameter>\n'
        '<｜DSML｜ parameter name="days" string="false">3</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>',
        [_DAYS],
        "Let me check.",
    ),
    (
        "dots",
        '<dots_function_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="days">\n3\n</parameter>\n</invoke>\n<invoke name="ping">\n</invoke>\n</dots_function_call>',
        [_DAYS, ("ping", {})],
        "",
    ),
    (
        "dots",
        'Well.<dots_function_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</dots_function_call>',
        [_PARIS],
        "Well.",
    ),
    (
        "gemma4",
        'Yes.<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|><|tool_call>call:ping{}<tool_call|>',
        [_DAYS, ("ping", {})],
        "Yes.",
    ),
    (
        "gemma4",  # some checkpoints leave out "call" and the marks of strings
        "<|tool_call>:get_weather{city:Paris, days: 3}<tool_call|>",
        [_DAYS],
        "",
    ),
    (
        "hy_v3",
        "Checking.<tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>ping<tool_sep>\n</tool_call>\n"
        "</tool_calls>",
        [_DAYS, ("ping", {})],
        "Checking.",
    ),
    (
        "hy_v4",
        "<tool_calls><tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value><arg_key>days</arg_key>"
        "<arg_value>3</arg_value></tool_call><tool_call>ping</tool_call></tool_calls>",
        [_DAYS, ("ping", {})],
        "",
    ),
    (
        "hermes",
        'Sure.\n<tool_call>\n{"arguments": {"city": "Paris", "days": 3}, "name": "get_weather"}\n</tool_call>',
        [_DAYS],
        "Sure.",
    ),
    (
        "hermes",  # Qwen2.5 sometimes omits the last brace, and sometimes doubles it
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}\n</tool_call>\n'
        '<tool_call>\n{"name": "ping", "arguments": {}}}\n</tool_call>',
        [_PARIS, ("ping", {})],
        "",
    ),
    (
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>'
        '<tool_call>{"name": "ping"}</tool_call>',
        [_PARIS, ("ping", {})],
        "",
    ),
    (
        "longcat",
        '<longcat_tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</longcat_tool_call>',
        [_PARIS],
        "",
    ),
    ("mistral", '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]', [_PARIS], ""),
    (
        "mistral",
        'Let me see.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]ping[CALL_ID]abcdefghi[ARGS]{}',
        [_PARIS, ("ping", {})],
        "Let me see.",
    ),
    ("mistral", '[TOOL_CALLS]get_weather{"city": "Paris", "days": 3}', [_DAYS], ""),
    (
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}',
        [_PARIS],
        "",
    ),
    (
        "llama3_json",
        '{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "ping", "arguments": {}}',
        [_PARIS, ("ping", {})],
        "",
    ),
    (
        "llama4_pythonic",
        '<|python_start|>[get_weather(city="Paris", days=3), ping()]<|python_end|>',
        [_DAYS, ("ping", {})],
        "",
    ),
    ("pythonic", "[get_weather(city='Paris'), get_weather(city=\"Paris\", days=3)]", [_PARIS, _DAYS], ""),
    (
        "pythonic",
        "[book_trip(legs=({'to': 'A'},), options=None, note='''two\nlines \\x41\\u00e9 \\'q\\' ''')]",
        [("book_trip", {"legs": [{"to": "A"}], "options": None, "note": "two\nlines Aé 'q' "})],
        "",
    ),
    ("granite", '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]', [_PARIS], ""),
    (
        "glm45",  # an argument's name that is not closed
        "<tool_call>get_weather\n<arg_key>city\n<arg_value>Paris</arg_value>\n</tool_call>",
        [_PARIS],
        "",
    ),
    (
        "granite",
        '<tool_call> [{"arguments": {"city": "Paris"}, "name": "get_weather"}, {"name": "ping", "arguments": {}}]',
        [_PARIS, ("ping", {})],
        "",
    ),
    (
        "granite-20b-fc",
        '<function_call> {"name": "get_weather", "arguments": {"city": "Paris"}} '
        '<function_call> {"name": "ping", "arguments": {}}',
        [_PARIS, ("ping", {})],
        "",
    ),
    (
        "inkling",
        '<|content_text|>Well.<|end_message|><|message_model|>get_weather<|content_invoke_tool_json|>{"name":'
        '"get_weather","args":{"city":"Paris"}}<|end_message|><|message_model|><|content_invoke_tool_json|>'
        '{"name":"ping","args":{}}<|end_message|><|content_model_end_sampling|>',
        [_PARIS, ("ping", {})],
        "Well.",
    ),
    (
        "internlm",
        'See.<|action_start|><|plugin|>\n{"name": "get_weather", "parameters": {"city": "Paris"}}\n<|action_end|>\n',
        [_PARIS],
        "See.",
    ),
    (
        "jamba",
        ' <tool_calls>[\n    {"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n]</tool_calls>',
        [_DAYS],
        "",
    ),
    ("phi4_mini_json", 'functools[{"name": "get_weather", "arguments": {"city": "Paris"}}]', [_PARIS], ""),
    (
        "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Paris"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>ping\n```json\n{}\n```'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [_PARIS, ("ping", {})],
        "",
    ),
    (
        "deepseek_v31",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>ping<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [_PARIS, ("ping", {})],
        "",
    ),
    (
        "deepseek_v32",
        'Let me check.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
        [_DAYS],
        "Let me check.",
    ),
    (
        "deepseek_v32",  # a value that is not closed
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">a<b>'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>',
        [("get_weather", {"city": "a<b>", "days": 3})],
        "",
    ),
    (
        "deepseek_v4",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="ping">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
        [("ping", {})],
        "",
    ),
    (
        "ernie45",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n',
        [_PARIS],
        "",
    ),
    (
        "functiongemma",
        "<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:3}<end_function_call>",
        [_DAYS],
        "",
    ),
    (
        "gigachat3",
        'Смотрю.<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "get_weather", "arguments": {"city": "Paris"}}',
        [_PARIS],
        "Смотрю.",
    ),
    (
        "glm45",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>",
        [_DAYS],
        "",
    ),
    (
        "glm45",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>"
        "<tool_call>ping</tool_call>",
        [_PARIS, ("ping", {})],
        "",
    ),
    (
        "hunyuan_a13b",
        '<tool_calls>[{"name": "get_weather", "arguments": {"city": "Paris"}}]</tool_calls>',
        [_PARIS],
        "",
    ),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Paris"}<|tool_call_end|><|tool_call_begin|>functions.ping:1<|tool_call_argument_begin|>{}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        [_PARIS, ("ping", {})],
        "",
    ),
    (
        "k2_horizon",
        "So.<ifm|tool_calls><ifm|tool_call>get_weather<ifm|arg_key>city</ifm|arg_key><ifm|arg_value>Paris</ifm|arg_value>"
        "<ifm|arg_key>days</ifm|arg_key>\n<ifm|arg_value> 3 </ifm|arg_value></ifm|tool_call>\n"
        "<ifm|tool_call>ping</ifm|tool_call></ifm|tool_calls>",
        [_DAYS, ("ping", {})],
        "So.",
    ),
    (
        "k2_horizon",  # the typed notation, with a type that the schema leaves open
        "<ifm|tool_calls><ifm|tool_call>get_weather<ifm|arg_key>city</ifm|arg_key><ifm|arg_type>string</ifm|arg_type>"
        "<ifm|arg_value>Paris</ifm|arg_value><ifm|arg_key>id</ifm|arg_key><ifm|arg_type>string</ifm|arg_type>"
        "<ifm|arg_value>7</ifm|arg_value></ifm|tool_call></ifm|tool_calls>",
        [("get_weather", {"city": "Paris", "id": "7"})],
        "",
    ),
    (
        "k2_horizon",  # the notation in JSON
        '<ifm|tool_calls><ifm|tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</ifm|tool_call>\n'
        '<ifm|tool_call> {"name": "ping", "arguments": {}} </ifm|tool_call></ifm|tool_calls>',
        [_PARIS, ("ping", {})],
        "",
    ),
    (
        "kimi_k2",  # an id without an index makes no call
        "So.<|tool_calls_section_begin|><|tool_call_begin|>functions.ping.0 <|tool_call_argument_begin|>{"
        '"a": "}"} <|tool_call_end|><|tool_call_begin|>get_weather:7 <|tool_call_argument_begin|> {"city": "Paris"} '
        "<|tool_call_end|><|tool_call_begin|>ping<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        [_PARIS],
        "So.",
    ),
    (
        "kimi_k3",
        "<|open|>response<|sep|>So.<|close|>response<|sep|><|open|>tools<|sep|>"
        '<|open|>call tool="get_weather" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>Paris'
        '<|close|>argument<|sep|><|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|>'
        '<|close|>call<|sep|><|open|>call tool="ping" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
        "<|close|>message<|sep|>",
        [_DAYS, ("ping", {})],
        "So.",
    ),
    (
        "lfm2",  # with an echo of the call, which is dropped
        "Let me look.<|tool_call_start|>[get_weather(city='Paris', days=03)]<|tool_call_end|>\n"
        "[get_weather(city='Paris', days=03)]<|tool_call_end|>It is sunny.",
        [_DAYS],
        "Let me look.\nIt is sunny.",
    ),
    (
        "lfm2",  # quotes that are not escaped, raw lines, and a set
        "<|tool_call_start|> [book_trip(note='sed -n '1,9p' f.py'), book_trip(note='a -c \"x\n"
        "y(m='\\,'))\"'), book_trip(legs={'a', 'b'})]<|tool_call_end|>",
        [
            ("book_trip", {"note": "sed -n '1,9p' f.py"}),
            ("book_trip", {"note": "a -c \"x\ny(m='\\,'))\""}),
            ("book_trip", {"legs": ["a", "b"]}),
        ],
        "",
    ),
    ("lfm2", "<|tool_call_start|>[ping(), ping(x=b'z')]<|tool_call_end|>", [("ping", {})], ", ping(x=b'z')]"),
    (
        "minimax",
        '<tool_calls>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n{"name": "ping", "arguments": {}}\n'
        "</tool_calls>",
        [_PARIS, ("ping", {})],
        "",
    ),
    (
        "minicpm5",
        'So.\n<function name="get_weather"><param name="city">a &lt; "b"</param><param name="days">3</param></function>'
        "<functionname='ping'>\n</function>",
        [("get_weather", {"city": 'a < "b"', "days": 3}), ("ping", {})],
        "So.",
    ),
    (
        "minicpm5",  # other functions than those offered are text
        '<function name="get_weather"><param name="city"><![CDATA[Pa<b>\n&amp;]]></param></function>'
        '<function name="f"><param name="x">1',
        [("get_weather", {"city": "Pa<b>\n&amp;"})],
        '<function name="f"><param name="x">1',
    ),
    (
        "minicpm5",  # all arguments in one
        "<function name=\"get_weather\"><param name=\"properties\">{'city': 'Paris', 'days': 3}</param></function>",
        [_DAYS],
        "",
    ),
    (
        "minimax_m3",
        'So.]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="get_weather">]<]minimax[>[<city>Paris'
        "]<]minimax[>[</city>]<]minimax[>[<days>3]<]minimax[>[</days>]<]minimax[>[</invoke>\n]<]minimax[>[<invoke "
        "name='book_trip'>]<]minimax[>[<legs>]<]minimax[>[<item>]<]minimax[>[<to>A]<]minimax[>[</to>"
        "]<]minimax[>[</item>]<]minimax[>[</legs>]<]minimax[>[<options>]<]minimax[>[</options>"
        "]<]minimax[>[<note>\n  a <b>\n]<]minimax[>[</note>]<]minimax[>[<x>1]<]minimax[>[</x>"
        "]<]minimax[>[<x>hi ]<]minimax[>[<k>v]<]minimax[>[</k>]<]minimax[>[</x>"
        "]<]minimax[>[</invoke>\n]<]minimax[>[<invoke name=ping>]<]minimax[>[</invoke>]<]minimax[>[</tool_call>",
        [
            _DAYS,
            (
                "book_trip",
                {"legs": [{"to": "A"}], "options": {}, "note": "\n  a <b>\n", "x": ["1", {"k": "v", "$text": "hi "}]},
            ),
            ("ping", {}),
        ],
        "So.",
    ),
    (
        "minimax_m3",  # from the first malformed element on, arguments are dropped
        ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="get_weather">]<]minimax[>[<city>Paris'
        "]<]minimax[>[</city>junk]<]minimax[>[<days>3]<]minimax[>[</days>]<]minimax[>[</invoke>]<]minimax[>[</tool_call>",
        [_PARIS],
        "",
    ),
    (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="ping">\n</invoke>\n</minimax:tool_call>',
        [_DAYS, ("ping", {})],
        "",
    ),
    (
        "muse_glimmer",  # calls that reasoning mentions are not made
        ' to=self<|message|>Not <atem:invoke name="ping"></atem:invoke> to=5.<|eom|><|start|>assistant to=get_weather'
        '<|message|><atem:function_calls>\n<atem:invoke name="get_weather.get_weather">\n<atem:parameter name="city">'
        'Paris</atem:parameter>\n<atem:parameter name="days">3</atem:parameter>\n</atem:invoke>\n'
        "</atem:function_calls><|eom|><|start|>assistant to=user<|message|>So.<|eot|>",
        [_DAYS],
        "So.",
    ),
    (
        "muse_glimmer",  # without any message
        '<atem:function_calls><atem:invoke name="ping"></atem:invoke></atem:function_calls>',
        [("ping", {})],
        "",
    ),
    (
        "minimax_m2",  # a value that is not closed
        '<minimax:tool_call><invoke name="get_weather"><parameter name="city">Paris</parameter><parameter name="days">3'
        "</invoke></minimax:tool_call>",
        [_DAYS],
        "",
    ),
    (
        "olmo3",
        '<function_calls>get_weather(city="Paris", metric=true)\nping()</function_calls>',
        [("get_weather", {"city": "Paris", "metric": True}), ("ping", {})],
        "",
    ),
    (
        "openai",
        "<|channel|>analysis<|message|>Paris, then.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}',
        [_PARIS],
        "",
    ),
    (
        "openai",  # without the prefix of functions, and with a preamble
        "<|channel|>commentary<|message|>Let me look that up.<|end|>"
        '<|start|>assistant to=get_weather<|channel|>analysis <|constrain|>json<|message|>{"city": "Paris"}<|call|>'
        "<|start|>assistant<|channel|>final<|message|>So.<|return|>",
        [_PARIS],
        "Let me look that up.\nSo.",
    ),
    (
        "openai",
        '<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>',
        [_PARIS],
        "",
    ),
    (
        "plamo3",
        "So.<|plamo:begin_tool_requests:plamo|><|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>"
        "get_weather<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json"
        '<|plamo:msg|>{"city": "Paris"}<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>'
        "<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>ping<|plamo:end_tool_name:plamo|>"
        "<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>{}"
        "<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|><|plamo:end_tool_requests:plamo|>"
        "<|plamo:tag|>",
        [_PARIS, ("ping", {})],
        "So.",
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>",
        [_DAYS],
        "",
    ),
    (
        "qwen3_coder",  # without one opening and one closing tag, as Qwen3-Coder sometimes writes
        "<function=get_weather>\n<parameter=city>\nParis\n<parameter=days>\n3\n</function>\n</tool_call>",
        [_DAYS],
        "",
    ),
    (
        "seed_oss",
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n<parameter=days>3</parameter>\n"
        "</function>\n</seed:tool_call>",
        [_DAYS],
        "",
    ),
    (
        "step3",
        '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="get_weather">'
        '<steptml:parameter name="city">Paris</steptml:parameter><steptml:parameter name="days">3</steptml:parameter>'
        "</steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>",
        [_DAYS],
        "",
    ),
    (
        "mimo",
        "<tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n</function>\n</tool_call>",
        [_PARIS],
        "",
    ),
    ("xlam", '[{"name": "get_weather", "arguments": {"city": "Paris"}}]', [_PARIS], ""),
    (
        "xlam",
        'Here:\n```json\n[{"name": "get_weather", "arguments": {"city": "Paris"}}]\n```',
        [_PARIS],
        "Here:",
    ),
    ("xlam", '[TOOL_CALLS][{"name": "ping", "arguments": {}}]', [("ping", {})], ""),
]
"""Parser, text, the calls in it, and what is left as content."""
