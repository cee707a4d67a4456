"""The real OpenAI client against the demo model: calls of functions and reasoning in chat completions."""

import json
from typing import Any, cast

import httpx
import openai
import pydantic
import pytest

from tests.servers import ServerProcess
from tests.weather import QUESTION, REPLY, RESULT, WEATHER_FUNCTION, asked

WEATHER: Any = {"type": "function", "function": WEATHER_FUNCTION}
ASK: Any = [{"role": "user", "content": QUESTION}]
THINK: Any = [{"role": "user", "content": "What is 47 + 38? Think step by step."}]


@pytest.fixture(scope="module")
def client(demo_server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=demo_server.base_url + "/v1", api_key="none", max_retries=0)


def ask(client: openai.OpenAI, messages: Any = ASK, **options: Any) -> Any:
    options = {"tools": [WEATHER], "temperature": 0, **options}
    return client.chat.completions.create(model="quire-demo", messages=messages, **options)


def test_agent_loop(client: openai.OpenAI) -> None:
    choice = ask(client).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    [call] = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert json.loads(call.function.arguments) == asked("Paris")
    result = {"role": "tool", "tool_call_id": call.id, "content": RESULT}
    answer = ask(client, [*ASK, choice.message, result]).choices[0]
    assert (answer.message.content, answer.finish_reason) == (REPLY, "stop")
    assert answer.message.tool_calls is None


def test_streamed_calls_add_up_to_whole_ones(client: openai.OpenAI) -> None:
    whole = ask(client).choices[0]
    with client.chat.completions.stream(model="quire-demo", messages=ASK, tools=[WEATHER], temperature=0) as stream:
        events = list(stream)
        streamed = stream.get_final_completion().choices[0]
    assert any(event.type == "tool_calls.function.arguments.delta" for event in events)
    assert not any(event.delta for event in events if event.type == "content.delta"), "no markup is told as text"
    assert streamed.finish_reason == "tool_calls"
    [one], [other] = whole.message.tool_calls, streamed.message.tool_calls
    assert (one.function.name, one.function.arguments) == (other.function.name, other.function.arguments)
    assert other.id


def test_each_of_n_answers_has_calls_of_its_own(client: openai.OpenAI) -> None:
    ids: dict[int, str] = {}
    for chunk in ask(client, n=2, stream=True):
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or ():
                ids[choice.index] = call.id or ids[choice.index]
    assert sorted(ids) == [0, 1]
    assert len(set(ids.values())) == 2


def test_what_a_chunk_carries_beside_text_is_not_lost(client: openai.OpenAI) -> None:
    extra = {"return_token_ids": True}
    whole = ask(client, logprobs=True, extra_body=extra).choices[0]
    chunks = [chunk.choices[0] for chunk in ask(client, logprobs=True, stream=True, extra_body=extra)]
    token_ids = [token_id for chunk in chunks for token_id in getattr(chunk, "token_ids", None) or []]
    logprobs = [entry for chunk in chunks if chunk.logprobs for entry in chunk.logprobs.content]
    assert token_ids == whole.token_ids
    assert len(logprobs) == len(whole.logprobs.content) == len(token_ids)


def test_streamed_reasoning_adds_up(client: openai.OpenAI) -> None:
    whole = ask(client, THINK, tools=openai.omit).choices[0].message
    reasoning, content = "", ""
    for chunk in ask(client, THINK, tools=openai.omit, stream=True):
        delta = chunk.choices[0].delta
        assert getattr(delta, "reasoning", None) == getattr(delta, "reasoning_content", None)
        reasoning += getattr(delta, "reasoning", None) or ""
        content += delta.content or ""
    assert (reasoning, content) == (whole.reasoning, whole.content)
    assert content == "47 + 38 = 85"


def test_reasoning_can_be_left_out(client: openai.OpenAI) -> None:
    options: Any = {"tools": openai.omit, "extra_body": {"include_reasoning": False}}
    message = ask(client, THINK, **options).choices[0].message
    assert (message.reasoning, message.content) == (None, "47 + 38 = 85")
    deltas = [chunk.choices[0].delta for chunk in ask(client, THINK, stream=True, **options)]
    assert not any(getattr(delta, "reasoning", None) for delta in deltas)
    assert "".join(delta.content or "" for delta in deltas) == "47 + 38 = 85"


@pytest.mark.parametrize("told", [True, False])
def test_reasoning_is_the_answer_where_an_answer_is_forced(client: openai.OpenAI, told: bool) -> None:
    """The reasoning is cut off. A whole answer moves it; a stream has told it already, and tells it again."""
    options: Any = {"tools": openai.omit, "max_tokens": 8}
    cut = ask(client, THINK, **options).choices[0].message
    assert cut.reasoning
    assert not cut.content
    options["extra_body"] = {"chat_template_kwargs": {"force_nonempty_content": True}, "include_reasoning": told}
    forced = ask(client, THINK, **options).choices[0]
    assert (forced.message.content, forced.message.reasoning) == (cut.reasoning, None)
    assert forced.finish_reason == "length"
    deltas = [chunk.choices[0].delta for chunk in ask(client, THINK, stream=True, **options)]
    assert "".join(delta.content or "" for delta in deltas) == cut.reasoning
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == (cut.reasoning if told else "")
    answered = ask(client, THINK, **{**options, "max_tokens": 200}).choices[0].message
    assert answered.content == "47 + 38 = 85"
    calling = ask(client, extra_body=options["extra_body"]).choices[0].message
    assert calling.content is None
    assert calling.tool_calls


def test_no_token_tells_reasoning_that_is_left_out(client: openai.OpenAI) -> None:
    options: Any = {"messages": THINK, "tools": openai.omit, "logprobs": True, "top_logprobs": 2}
    told = ask(client, **options, extra_body={"return_token_ids": True})
    assert len(told.choices[0].token_ids) == len(told.choices[0].logprobs.content) == told.usage.completion_tokens
    assert 0 < told.usage.completion_tokens_details.reasoning_tokens < told.usage.completion_tokens

    options["extra_body"] = {"return_token_ids": True, "include_reasoning": False}
    hidden = ask(client, **options)
    assert (hidden.choices[0].token_ids, hidden.choices[0].logprobs) == (None, None)
    assert hidden.prompt_token_ids == told.prompt_token_ids
    assert hidden.usage == told.usage

    chunks = list(ask(client, **options, stream=True, stream_options={"include_usage": True}))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert not any(getattr(choice, "token_ids", None) or choice.logprobs for choice in choices)
    assert "".join(choice.delta.content or "" for choice in choices) == hidden.choices[0].message.content
    assert all(choice.delta.role or choice.delta.content or choice.finish_reason for choice in choices), "no empty ones"
    assert chunks[0].prompt_token_ids == told.prompt_token_ids
    assert chunks[-1].usage == told.usage


def test_batch_counts_reasoning(client: openai.OpenAI) -> None:
    body = {"messages": [THINK, ASK], "temperature": 0, "include_reasoning": False, "return_token_ids": True}
    body["max_tokens"] = 200
    answer: Any = client.post("/chat/completions/batch", body=body, cast_to=object)
    assert [choice["token_ids"] for choice in answer["choices"]] == [None, None]
    alone = ask(client, THINK, tools=openai.omit).usage.completion_tokens_details.reasoning_tokens
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": alone}


def test_beams_do_not_follow_a_grammar(client: openai.OpenAI) -> None:
    for options in (
        {"tool_choice": "required"},
        {"tools": [{**WEATHER, "function": {**WEATHER_FUNCTION, "strict": True}}]},
    ):
        with pytest.raises(openai.BadRequestError, match="use_beam_search") as caught:
            ask(client, max_tokens=5, extra_body={"use_beam_search": True}, **options)
        assert caught.value.param == "tools"


def test_a_server_without_a_parser_does_not_hand_out_markup(base_url: str) -> None:
    with openai.OpenAI(base_url=base_url + "/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError, match="--tool-call-parser") as caught:
            client.chat.completions.create(model="tiny", messages=ASK, tools=[WEATHER], max_tokens=1)
        assert caught.value.param == "tool_choice"
        assert client.chat.completions.create(
            model="tiny", messages=ASK, tools=[WEATHER], tool_choice="none", max_tokens=1
        )


def test_batch_answers_every_conversation(client: openai.OpenAI) -> None:
    questions = ["Hello!", "What is the capital of France?"]
    body = {"messages": [[{"role": "user", "content": text}] for text in questions], "temperature": 0}
    answer: Any = client.post("/chat/completions/batch", body=body, cast_to=object)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert texts == ["Hello! How can I help you?", "The capital of France is Paris."]
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"]
    for wrong, param in (({"messages": []}, "messages"), ({"stream": True}, "stream"), ({"tools": [WEATHER]}, "tools")):
        with pytest.raises(openai.BadRequestError) as caught:
            client.post("/chat/completions/batch", body={**body, **wrong}, cast_to=object)
        assert caught.value.param == param


def test_rendered_prompts_are_those_that_are_served(client: openai.OpenAI) -> None:
    body = {"messages": ASK, "tools": [WEATHER], "max_tokens": 5, "temperature": 0.5}
    rendered: Any = client.post("/chat/completions/render", body=body, cast_to=object)
    served = ask(client, max_tokens=5, extra_body={"return_token_ids": True})
    assert rendered["token_ids"] == served.prompt_token_ids
    assert (rendered["sampling_params"]["max_tokens"], rendered["sampling_params"]["temperature"]) == (5, 0.5)
    assert rendered["prompt_text"].endswith("<|im_start|>assistant\n")
    body = {"prompt": "a b", "return_token_offsets": True}
    [text] = cast(Any, client.post("/completions/render", body=body, cast_to=object))
    assert len(text["token_offsets"]) == len(text["token_ids"])
    assert text["token_offsets"][-1][1] == len("a b")
    texts: Any = client.post("/completions/render", body={"prompt": [[5], [6, 7]]}, cast_to=object)
    assert [text["token_ids"] for text in texts] == [[5], [6, 7]]


def test_invocations_take_chats_and_texts(demo_server: ServerProcess) -> None:
    client = openai.OpenAI(base_url=demo_server.base_url, api_key="none", max_retries=0)
    chat: Any = client.post("/invocations", body={"messages": ASK, "max_tokens": 1}, cast_to=object)
    text: Any = client.post("/invocations", body={"prompt": "a", "max_tokens": 1}, cast_to=object)
    assert (chat["object"], text["object"]) == ("chat.completion", "text_completion")
    with pytest.raises(openai.BadRequestError, match="messages, or prompt"):
        client.post("/invocations", body={}, cast_to=object)


CLOCK: Any = {
    "type": "function",
    "function": {
        "name": "set_clock",
        "parameters": {"type": "object", "properties": {"hour": {"enum": [7, 8]}}, "required": ["hour"]},
    },
}
HELLO: Any = [{"role": "user", "content": "Hello!"}]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "set_clock"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_asked_for_is_made(client: openai.OpenAI, choice: Any, stream: bool) -> None:
    options: Any = {"tools": [CLOCK], "tool_choice": choice, "max_tokens": 100, "parallel_tool_calls": False}
    if stream:
        with client.chat.completions.stream(model="quire-demo", messages=HELLO, temperature=0, **options) as events:
            answered = events.get_final_completion().choices[0]
    else:
        answered = ask(client, HELLO, **options).choices[0]
    assert answered.finish_reason == ("tool_calls" if choice == "required" else "stop")
    message = answered.message
    [call] = message.tool_calls
    assert call.function.name == "set_clock"
    assert json.loads(call.function.arguments)["hour"] in (7, 8)
    assert not message.content


def test_arguments_of_a_strict_function_follow_its_schema(client: openai.OpenAI) -> None:
    city = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
    strict: Any = {"type": "function", "function": {**WEATHER_FUNCTION, "parameters": city, "strict": True}}
    [call] = ask(client, tools=[strict]).choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == asked("Rome")


class Sum(pydantic.BaseModel):
    total: int


def test_parsed_outputs_come_after_reasoning(client: openai.OpenAI) -> None:
    question: Any = [{"role": "user", "content": "What is 47 + 38?"}]
    for extra, thinks in (({"reasoning_effort": "high"}, True), ({}, False)):
        parsed = client.chat.completions.parse(
            model="quire-demo", messages=question, response_format=Sum, temperature=0, max_tokens=200, extra_body=extra
        )
        message = parsed.choices[0].message
        assert isinstance(message.parsed, Sum)
        assert bool(message.reasoning) is thinks  # type: ignore[attr-defined]
    response = client.responses.parse(model="quire-demo", input="What is 47 + 38?", text_format=Sum, temperature=0)
    assert isinstance(response.output_parsed, Sum)


class Person(pydantic.BaseModel):
    name: str
    age: int


EXTRACT = "Extract the data as JSON. Ben is 42 years old. Keys: name (string), age (integer)."
PERSON_SCHEMA: Any = {**Person.model_json_schema(), "additionalProperties": False}
PERSON: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON_SCHEMA}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("effort", ["none", "high"])
def test_an_answer_is_a_call_or_has_the_format(client: openai.OpenAI, stream: bool, effort: Any) -> None:
    """Agents of typed answers send tools and a format with each request. A bias keeps the model from calling."""

    def message(question: str, **options: Any) -> Any:
        options |= {"response_format": PERSON, "tools": [WEATHER, CLOCK], "reasoning_effort": effort}
        options |= {"max_tokens": 200, "temperature": 0}
        messages: Any = [{"role": "user", "content": question}]
        if stream:
            with client.chat.completions.stream(model="quire-demo", messages=messages, **options) as events:
                return events.get_final_completion().choices[0]
        return client.chat.completions.create(model="quire-demo", messages=messages, **options).choices[0]

    called = message(QUESTION)
    [call] = called.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", asked("Paris"))
    assert called.finish_reason == "tool_calls"
    assert not called.message.content
    begin: Any = httpx.post(str(client.base_url.join("/tokenize")), json={"prompt": "<tool_call>"}).json()["tokens"]
    answered = message(EXTRACT, logit_bias={str(begin[0]): -100})
    assert Person.model_validate_json(answered.message.content)
    assert not answered.message.tool_calls
    assert answered.finish_reason == "stop"


@pytest.mark.parametrize(
    "form",
    [
        {"response_format": PERSON},
        {"structured_outputs": {"json": json.dumps(Person.model_json_schema())}},
        {"guided_regex": "yes|no"},
    ],
)
def test_a_call_stands_beside_every_kind_of_format(client: openai.OpenAI, form: dict[str, Any]) -> None:
    """A question for the weather gets a call; a call that the client requires takes the format's place."""
    for choice in ("auto", "required"):
        message = ask(client, tool_choice=choice, extra_body=form).choices[0].message
        assert [call.function.name for call in message.tool_calls] == ["get_weather"]
        assert not message.content
    assert not ask(client, tool_choice="none", max_tokens=20, extra_body=form).choices[0].message.tool_calls


def test_a_named_function_and_a_constraint_of_vllms_contradict(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    assert ask(client, tool_choice=named, extra_body={"response_format": PERSON}).choices[0].message.tool_calls
    with pytest.raises(openai.BadRequestError, match="contradict each other") as caught:
        ask(client, tool_choice=named, extra_body={"structured_outputs": {"regex": "a"}})
    assert caught.value.param == "structured_outputs"


def test_other_protocols_take_tools_beside_a_format(client: openai.OpenAI, demo_server: ServerProcess) -> None:
    question: Any = {"temperature": 0, "tools": [{"type": "function", **WEATHER_FUNCTION}], "input": QUESTION}
    response = client.responses.create(
        model="quire-demo", text={"format": {"type": "json_schema", "name": "p", "schema": PERSON_SCHEMA}}, **question
    )
    assert [item.type for item in response.output] == ["function_call"]
    body = {"model": "quire-demo", "max_tokens": 100, "temperature": 0, "messages": ASK}
    body["tools"] = [{"name": "get_weather", "input_schema": WEATHER_FUNCTION["parameters"]}]
    body["output_config"] = {"format": {"type": "json_schema", "schema": PERSON_SCHEMA}}
    answer = httpx.post(f"{demo_server.base_url}/v1/messages", json=body, timeout=60).json()
    assert [part["type"] for part in answer["content"]] == ["tool_use"]
