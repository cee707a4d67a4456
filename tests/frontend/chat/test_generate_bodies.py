"""The effects of a server's options and a request's fields on a rendered conversation, by the routes that render."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.core.wire.sampling_params import RequestOutputKind
from quire.frontend.async_llm import AsyncLLM
from tests.frontend.http.test_app import Caller

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
PARTS: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
LOOP = "{% for part in messages[0].content %}<{{ part.text }}>{% endfor %}"


@pytest.fixture(scope="module")
def engine(checkpoint: Callable[..., Path]) -> AsyncLLM:
    """An engine that is configured but never started."""
    return AsyncLLM.from_engine_args(model=str(checkpoint("llama")), served_model_name=["tiny"])


@pytest.fixture
def caller(engine: AsyncLLM) -> Iterator[Callable[..., Caller]]:
    made: list[Caller] = []

    def make(**options: Any) -> Caller:
        made.append(Caller(engine, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def render(call: Caller, messages: Any = HELLO, **fields: Any) -> str:
    answer = call("POST", "/v1/chat/completions/render", json={"messages": messages, **fields})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["prompt_text"])


def refused(answer: httpx.Response) -> str:
    """The field at fault."""
    assert answer.status_code == 400, answer.text
    return str(answer.json()["error"]["param"])


def test_which_roles_there_are_the_template_decides(caller: Callable[..., Caller]) -> None:
    strict = TURNS.replace("%}[", "%}{% if m.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}[", 1)
    latest = [*HELLO, {"role": "latest_reminder", "content": "Be brief."}]
    assert render(caller(chat_template=TURNS), latest) == "[user]Hello[latest_reminder]Be brief.>"
    assert render(caller(chat_template=strict), latest) == "[user]Hello[latest_reminder]Be brief.>"
    messages = [{"role": "robot", "content": "a"}]
    answer = caller(chat_template=strict)("POST", "/v1/chat/completions", json={"messages": messages})
    assert refused(answer) == "messages"
    assert "no robots" in answer.text


@pytest.mark.parametrize(
    ("template", "content_format", "text"),
    [
        (LOOP, "auto", "<a><b>"),
        (LOOP, "openai", "<a><b>"),
        (LOOP, "string", "<><><>"),  # the characters of one text
        ("{{ messages[0].content is string }}", "auto", "True"),
        ("{{ messages[0].content is string }}", "string", "True"),
        ("{{ messages[0].content is string }}", "openai", "False"),
    ],
)
def test_content_takes_the_form_that_the_server_says_or_the_template_shows(
    caller: Callable[..., Caller], template: str, content_format: str, text: str
) -> None:
    call = caller(chat_template=template, chat_template_content_format=content_format)
    assert render(call, PARTS) == text


def test_documents_reach_the_template(caller: Callable[..., Caller]) -> None:
    call = caller(chat_template="{% for d in documents or [] %}({{ d.title }}){% endfor %}{{ messages[0].content }}")
    assert render(call, documents=[{"title": "A", "text": "x"}, {"title": "B"}]) == "(A)(B)Hello"
    assert render(call) == "Hello"


def test_the_prompt_ends_as_the_request_says(caller: Callable[..., Caller]) -> None:
    call = caller(chat_template=TURNS)
    turns = [*HELLO, {"role": "assistant", "content": "I am"}]
    assert render(call, turns) == "[user]Hello[assistant]I am>"
    assert render(call, turns, add_generation_prompt=False) == "[user]Hello[assistant]I am"
    framed = caller(chat_template=TURNS.replace("{{ m.content }}", "{{ m.content }}<end>"))
    open_end = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(framed, turns, **open_end) == "[user]Hello<end>[assistant]I am"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/chat/completions/render", "/tokenize"])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"documents": []}}, "chat_template_kwargs"),
    ],
    ids=str,
)
def test_what_contradicts_itself_is_refused(
    caller: Callable[..., Caller], path: str, fields: dict[str, Any], param: str
) -> None:
    assert refused(caller()("POST", path, json={"messages": HELLO, **fields})) == param


def test_thoughts_of_a_message_are_rendered_and_those_that_nobody_can_read_are_left_out(
    caller: Callable[..., Caller],
) -> None:
    template = "{% for m in messages %}[{{ m.role }}]{{ m.reasoning_content }}|{{ m.content }}{% endfor %}"
    call = caller(chat_template=template)
    texts = [{"type": "text", "text": "85"}]
    thinking = {"type": "thinking", "thinking": "forty and forty", "signature": ""}
    redacted = {"type": "redacted_thinking", "data": "EmwKAhgBEgy3va3pzix"}

    def count(*blocks: Any) -> int:
        turns = [*HELLO, {"role": "assistant", "content": [*blocks, *texts]}, {"role": "user", "content": "And?"}]
        answer = call("POST", "/v1/messages/count_tokens", json={"model": "tiny", "messages": turns})
        assert answer.status_code == 200, answer.text
        return int(answer.json()["input_tokens"])

    said = {"role": "assistant", "content": "85", "reasoning_content": "forty and forty"}
    rendered = render(call, [*HELLO, said, {"role": "user", "content": "And?"}])
    assert "[assistant]forty and forty|85" in rendered
    same = call("POST", "/tokenize", json={"prompt": rendered, "add_special_tokens": False}).json()["count"]
    assert count(thinking) == count(redacted, thinking) == same
    assert count(redacted) == count() < count(thinking)


def test_ids_of_calls_are_made_fit_for_mistrals_templates(caller: Callable[..., Caller]) -> None:
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}"
        "{{ raise_exception('nine letters') }}{% endif %}({{ c.id }}){% endfor %}"
        "{% if m.tool_call_id %}({{ m.tool_call_id }}){% endif %}{% endfor %}"
    )
    calls = [{"id": "toolu_01A", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    calls.append({**calls[0], "id": "call_" + "x" * 40})
    turns = [*HELLO, {"role": "assistant", "content": "", "tool_calls": calls}]
    turns += [{"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in calls]
    text = render(caller(chat_template=template, tool_call_parser="mistral"), turns)
    assert text[: len(text) // 2] == text[len(text) // 2 :], "results have the ids of their calls"
    other = caller(chat_template=template, tool_call_parser="hermes")
    answer = other("POST", "/v1/chat/completions/render", json={"messages": turns})
    assert refused(answer) == "messages"


def test_sampling_is_the_requests_then_the_models_then_our_own(checkpoint: Callable[..., Path]) -> None:
    own = {"temperature": 0.9, "top_p": 0.8, "max_new_tokens": 30}
    call = Caller(AsyncLLM.from_engine_args(model=str(checkpoint("llama")), override_generation_config=own))
    asked: dict[str, Any] = {"temperature": 0.5, "stop": ["x"], "n": 2, "max_tokens": 7, "stream": True}
    try:
        chat = call("POST", "/v1/chat/completions/render", json={"messages": HELLO, **asked}).json()
        [text] = call("POST", "/v1/completions/render", json={"prompt": "Hello", **asked}).json()
    finally:
        call.close()
    for sampling in (chat["sampling_params"], text["sampling_params"]):
        assert (sampling["temperature"], sampling["top_p"], sampling.get("top_k", 0)) == (0.5, 0.8, 0)
        assert (sampling["stop"], sampling["n"], sampling["max_tokens"]) == (["x"], 2, 7)
        assert sampling["output_kind"] == RequestOutputKind.DELTA.value


def test_efforts_become_what_the_template_knows(caller: Callable[..., Caller]) -> None:
    template = "{{ reasoning_effort }} {{ enable_thinking }}"
    call = caller(chat_template=template, reasoning_effort_map={"medium": "high", "max": "none"})
    efforts = {"medium": "high True", "low": "low True", "max": "none False", "none": "none False"}
    assert {effort: render(call, reasoning_effort=effort) for effort in efforts} == efforts
    assert render(call, reasoning_effort="medium", chat_template_kwargs={"enable_thinking": False}) == "high False"
