"""Chat templates against Transformers' renderer, and errors for bad messages."""

from pathlib import Path

import pytest

from quire.core.errors import ParameterError
from quire.frontend.text import template_sandbox
from quire.frontend.text.chat_template import ChatTemplate, read_template

CHATML = (
    "{% for message in messages %}\n    {{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS_TEMPLATE = """{{ bos_token }}{%- for tool in tools or [] %}
{{ tool | tojson(indent=2) }}
{% endfor %}
{%- for message in messages %}
  {%- if message.role == 'skip' %}{% continue %}{% endif %}
  {%- if message.tool_calls %}{% for call in message.tool_calls %}
<call>{{ call.function.name }}({{ call.function.arguments | tojson }})</call>
  {%- endfor %}{% endif %}
  {% generation %}[{{ message.role }}] {{ message.content | trim }}{% endgeneration %}
{% endfor %}
{%- if reasoning is defined %}({{ reasoning }}){% endif %}"""
PARTS_TEMPLATE = (
    "{% for m in messages %}{% for part in m.content %}<{{ part.type }}>{{ part.text }}{% endfor %}{% endfor %}"
)
MESSAGES = [{"role": "system", "content": "Be <b>brief</b> & 'kind'."}, {"role": "user", "content": "Grüße 你好 "}]
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "description": "Wetter für <x>"}},
}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def theirs(source: str, messages: list, **options) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    [text], _ = render_jinja_template([messages], chat_template=source, **TOKENS, **options)
    return text


@pytest.mark.parametrize("source", [CHATML, TOOLS_TEMPLATE], ids=["chatml", "tools"])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["no-tools", "with-tools"])
def test_prompts_are_those_of_transformers(source: str, add_generation_prompt: bool, tools: list | None) -> None:
    options = {"tools": tools, "add_generation_prompt": add_generation_prompt}
    messages = [*MESSAGES, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "skip", "content": "x"}]
    ours = ChatTemplate(source, TOKENS).render(messages, **options, variables={"reasoning": "so"})
    assert ours == theirs(source, messages, **options, reasoning="so")


@pytest.mark.parametrize("source", [CHATML, TOOLS_TEMPLATE], ids=["keeps-spaces", "trims"])
@pytest.mark.parametrize("last", ["The answer", "The answer is "])
def test_the_last_message_can_be_continued(source: str, last: str) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": last}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    ours = ChatTemplate(source, TOKENS).render(messages, **options)
    assert ours == theirs(source, messages, **options)
    assert ours.rstrip().endswith(last.rstrip())


def test_tool_call_arguments_given_as_json_text_reach_the_template_as_an_object() -> None:
    as_text = CALL | {"function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
    template = ChatTemplate(TOOLS_TEMPLATE, TOKENS)
    prompts = {
        template.render([{"role": "assistant", "content": None, "tool_calls": [call]}]) for call in (CALL, as_text)
    }
    assert len(prompts) == 1
    assert '<call>weather({"city": "Köln"})</call>' in prompts.pop()
    assert as_text["function"]["arguments"] == '{"city": "Köln"}', "the caller's message is left as it was"


@pytest.mark.parametrize("arguments", [None, "", " ", '{"city": "K', "[]", "5", "null", "[" * 100_000, [], 5])
def test_a_conversation_goes_on_after_a_call_that_was_cut_short(arguments: object) -> None:
    call = {"function": {"name": "weather", "arguments": arguments}}
    prompt = ChatTemplate(TOOLS_TEMPLATE, TOKENS).render([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert "<call>weather({})</call>" in prompt


LOOPS = {  # ways to a message's parts
    "directly": "{% for p in m['content'] | list %}{{ p.text }}{% endfor %}",
    "a variable": "{% set given = m.content %}{% for p in given %}{{ p['text'] }}{% endfor %}",
    "a namespace": "{% set ns = namespace(it=m.content) %}{% for p in ns.it %}{{ p.text }}{% endfor %}",
    "a macro": "{% macro show(msg) %}{% for p in msg %}{{ p.text }}{% endfor %}{% endmacro %}{{ show(m.content) }}",
    "two macros": "{% macro one(x) %}{{ x.text }}{% endmacro %}{% macro show(body) %}"
    "{% for item in body %}{{ one(item) }}{% endfor %}{% endmacro %}{{ show(m['content']) }}",
    "a macro of messages": "{% macro show(x) %}{% for p in x.content %}{{ p.text }}{% endfor %}{% endmacro %}"
    "{{ show(m) }}",
    "filters": "{{ m.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join }}",
    "get": "{% for p in m.get('content') %}{{ p.get('text') }}{% endfor %}",
    "both": "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}",
    "either": "{% if m.content is iterable and m.content is not string %}"
    "{% for p in m.content %}{{ p.text }}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}",
}
TEXTS = {  # ways to a message's text
    "directly": "{{ m.content }}",
    "a variable": "{% set content = m['content'] %}{{ content | trim }}",
    "a macro": "{% macro show(content) %}{{ content }}{% endmacro %}{{ show(m.content) }}",
    "characters": "{% for letter in m.content %}{{ letter }}{% endfor %}",
    "lines": "{% for line in m.content.split('\n') %}{{ line }}\n{% endfor %}",
    "joined": "{{ '<' + m['content'] + '>' }}",
}


def each_message(body: str) -> str:
    return "{% for m in messages %}[" + body + "]{% endfor %}"


@pytest.mark.parametrize("way", LOOPS)
@pytest.mark.parametrize("role", ["user", "system", "assistant", "critic"])
def test_parts_are_read_on_whatever_way(way: str, role: str) -> None:
    template = ChatTemplate(each_message(LOOPS[way]), {})
    parts = [{"type": "text", "text": "Hello, "}, {"type": "text", "text": "you"}]
    assert template.render([{"role": role, "content": parts}]) == "[Hello, you]"
    assert template.render([{"role": role, "content": "Hello"}]) == "[Hello]"


@pytest.mark.parametrize("way", TEXTS)
def test_parts_become_a_string_where_the_template_reads_strings(way: str) -> None:
    template = ChatTemplate(each_message(TEXTS[way]), {})
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "you"}]
    assert template.render([{"role": "user", "content": parts}]).strip("[<\n>]") == "Hello\nyou"
    assert template.render([{"role": "user", "content": "Hello"}]).strip("[<\n>]") == "Hello"


def test_each_role_has_a_form_of_its_own() -> None:
    """As in Gemma 3's and other templates, whose system messages are read otherwise."""
    template = ChatTemplate(
        "{% if messages[0].role == 'system' %}{% if messages[0].content is string %}{{ messages[0].content + '\n' }}"
        "{% else %}{{ messages[0].content[0].text }}{% endif %}{% endif %}"
        "{% for m in messages if m.role == 'user' %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endfor %}"
        "{% for m in messages if m.role == 'tool' %}{{ '(' + m.content + ')' }}{% endfor %}",
        {},
    )
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": role, "content": parts} for role in ("system", "user", "tool")]
    assert template.render(messages) == "a\nb\n<a><b>(a\nb)"
    assert template.render([{"role": each["role"], "content": "c"} for each in messages]) == "c\n<c>(c)"


def test_one_part_where_only_the_first_is_read() -> None:
    template = ChatTemplate(each_message("{{ m.content[0]['text'] }}"), {})
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template.render([{"role": "user", "content": parts}]) == "[a\nb]"
    assert template.render([{"role": "user", "content": "c"}]) == "[c]"


def test_a_template_that_refuses_some_orders_of_roles_is_read_all_the_same() -> None:
    strict = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('order') }}"
    )
    template = ChatTemplate(strict + "{% endif %}" + LOOPS["a macro"] + "|{% endfor %}", {})
    conversation = [{"role": role, "content": role[0]} for role in ("user", "assistant", "user")]
    assert template.render(conversation) == "u|a|u|"
    with pytest.raises(ParameterError, match="order"):
        template.render(conversation[1:])


def test_a_role_that_the_template_leaves_out_is_no_fault() -> None:
    template = ChatTemplate("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", {})
    assert template.render([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]) == "u"


def test_content_takes_the_shape_that_the_template_reads() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    as_parts, as_text = [{"role": "user", "content": parts}], [{"role": "user", "content": "a"}]
    assert ChatTemplate(PARTS_TEMPLATE, {}).render(as_parts) == "<text>a<text>b"
    assert ChatTemplate(PARTS_TEMPLATE, {}).render(as_text) == "<text>a"
    assert "user\na\nb<|im_end|>" in ChatTemplate(CHATML, {}).render(as_parts)
    assert ChatTemplate("{{ messages[0].content is string }}", {}).render(as_parts, content_format="openai") == "False"


@pytest.mark.parametrize(
    ("messages", "options", "said"),
    [
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], {}, "image_url.*text only"),
        ([{"content": "no role"}], {}, r"messages\[0\] must be an object with a role"),
        ([{"role": "user", "content": 5}], {}, r"messages\[0\]\.content must be a string"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}],
            {},
            r"tool_calls\[0\] must hold a function with a name",
        ),
        (MESSAGES, {"continue_final_message": True}, "exclude each other"),
        (MESSAGES, {"variables": {"messages": []}}, "must not set 'messages'"),
        ([], {"add_generation_prompt": False, "continue_final_message": True}, "needs a last message"),
    ],
)
def test_bad_messages_are_refused_by_name(messages: list, options: dict, said: str) -> None:
    with pytest.raises(ParameterError, match=said):
        ChatTemplate(CHATML, {}).render(messages, **options)


def test_what_the_template_says_reaches_the_caller() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(ParameterError, match="roles must alternate") as caught:
        template.render(MESSAGES)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
    ],
)
def test_templates_stay_in_the_sandbox(source: str) -> None:
    try:
        text = ChatTemplate(source, {}).render(MESSAGES)
    except ParameterError:
        return
    assert text == "", "the sandbox hides attributes as undefined"


def test_a_template_with_wrong_syntax_is_refused() -> None:
    with pytest.raises(ParameterError, match="no valid Jinja"):
        ChatTemplate("{% for %}", {})


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "ran for more than"),
        ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}", "ran for"),
        ("{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}", "makes a text of more"),
        ("{{ 'x' * 10 ** 12 }}", "makes a text of more"),
        ("{{ 10 ** 9999999999 }}", "makes an integer of more"),
        ("{% set ns = namespace(t='x') %}{% for i in range(60) %}{% set ns.t = ns.t ~ ns.t %}{% endfor %}", "text of"),
        ("{% set ns = namespace(t='x') %}{% for i in range(60) %}{% set ns.t = ns.t + ns.t %}{% endfor %}", "text of"),
        ("{{ '%99999999999d' % 1 }}", "makes a text of more"),
        ("{{ 'x' | center(10 ** 12) }}", "makes a text of more"),
        ("{{ lipsum(10 ** 9) }}", "undefined"),
    ],
)
def test_a_template_that_would_never_end_is_ended(source: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.3)
    monkeypatch.setattr(template_sandbox, "MAX_TEXT_CHARACTERS", 1_000_000)
    with pytest.raises(ParameterError, match=said):
        ChatTemplate(source, {}).render(MESSAGES)


def test_a_template_may_not_be_endless_itself() -> None:
    with pytest.raises(ParameterError, match="at most 262144 are allowed"):
        ChatTemplate("x" * 300_000, {})


def test_a_byte_order_mark_before_a_template_is_no_content(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_bytes(b"\xef\xbb\xbf{{ messages[0].content }}")
    assert read_template(str(tmp_path / "chat.jinja")) == "{{ messages[0].content }}"
