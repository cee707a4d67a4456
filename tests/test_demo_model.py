"""The embedded demo model with a real server and the OpenAI client: what a new user tries first."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from quire import LLM, SamplingParams
from tests.servers import ServerProcess

MODEL_FOLDER = Path(__file__).parent.parent / "quire" / "demo_model"
MAX_BYTES = 6 << 20


def tool(name: str, what: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "The name of the city"}},
        "required": ["city"],
    }
    return {"type": "function", "function": {"name": name, "description": what, "parameters": parameters}}


WEATHER = tool("get_weather", "Get the current weather in a city")
TIME = tool("get_time", "Get the current time in a city")


@pytest.fixture(scope="module")
def client(demo_server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=demo_server.base_url + "/v1", api_key="none", max_retries=0)


def answer(client: openai.OpenAI, *turns: dict[str, Any], **options: Any) -> str:
    """The answer without a temperature: the checkpoint's own default is greedy."""
    reply = client.chat.completions.create(model="quire-demo", messages=list(turns), **options)  # type: ignore[call-overload]
    assert reply.choices[0].finish_reason == "stop"
    return reply.choices[0].message.content


def calls(client: openai.OpenAI, *turns: dict[str, Any]) -> list[Any]:
    """The functions that the model calls, with the parsers that the checkpoint names."""
    tools = [WEATHER, TIME]
    reply = client.chat.completions.create(model="quire-demo", messages=list(turns), temperature=0, tools=tools)  # type: ignore[call-overload]
    assert reply.choices[0].finish_reason == "tool_calls"
    assert reply.choices[0].message.content is None
    return [call.function for call in reply.choices[0].message.tool_calls]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


ANSWERS = [
    ("Hello!", "Hello! How can I help you?"),
    ("What is the capital of France?", "The capital of France is Paris."),
    ("What is 47 + 38?", "47 + 38 = 70 + 15 = 85"),
    ("What is 12 - 30?", "12 - 30 = -20 + 2 = -18"),
    ("Reverse the word planet.", "tenalp"),
    ('How many letters are in the word "banana"?', 'The word "banana" has 6 letters.'),
]


@pytest.mark.parametrize(("question", "expected"), ANSWERS)
def test_answers(client: openai.OpenAI, question: str, expected: str) -> None:
    assert answer(client, user(question)) == expected


def test_weights_of_one_byte_answer_as_well() -> None:
    """All questions but one, as a rounded weight may turn the scale; scores of many are in the model's README."""
    with LLM(str(MODEL_FOLDER), quantization="int8") as llm:
        outputs = llm.chat([[user(question)] for question, _ in ANSWERS], SamplingParams(temperature=0, max_tokens=100))
    texts = [output.outputs[0].text for output in outputs]
    assert sum(text == expected for text, (_, expected) in zip(texts, ANSWERS, strict=True)) >= len(ANSWERS) - 1


LOOSE = [
    "What is the capital of France?", "what is the capital of france", "Capital of France?", "capital of france",
    "What's the capital of France?", "Tell me the capital of France.", "Can you tell me the capital of France?",
    "France's capital?", "Which city is the capital of France?", "Hello! What is the capital of France?",
]  # fmt: skip


@pytest.mark.parametrize("temperature", [0.1, 1.0])
def test_known_questions_hold_at_any_usual_temperature(client: openai.OpenAI, temperature: float) -> None:
    for seed, question in enumerate(LOOSE):
        for system in ([], [{"role": "system", "content": "You are a helpful assistant."}]):
            text = answer(client, *system, user(question), temperature=temperature, seed=seed)
            assert text == "The capital of France is Paris."


def enforced(client: openai.OpenAI, question: str, **options: Any) -> str:
    return answer(client, user(question), max_tokens=100, **options)


def schema(**types: str) -> dict[str, Any]:
    properties = {name: {"type": kind} for name, kind in types.items()}
    inner = {"type": "object", "properties": properties, "required": list(types), "additionalProperties": False}
    return {"type": "json_schema", "json_schema": {"name": "reply", "schema": inner}}


ENFORCED = [
    ({"answer": "string"}, {"answer": "Paris"}), ({"capital": "string"}, {"capital": "Paris"}),
    ({"city": "string", "country": "string"}, {"city": "Paris", "country": "France"}),
]  # fmt: skip


@pytest.mark.parametrize(("types", "expected"), ENFORCED)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_under_a_schema(
    client: openai.OpenAI, types: dict[str, str], expected: dict[str, str], temperature: float
) -> None:
    reply = enforced(client, "What is the capital of France?", response_format=schema(**types), temperature=temperature)
    assert json.loads(reply) == expected


def test_fills_and_ends_strings_of_any_schema(client: openai.OpenAI) -> None:
    person = json.loads(enforced(client, "Give me a person.", response_format=schema(name="string", age="integer")))
    assert 0 < len(person["name"]) <= 20
    assert 0 < person["age"] < 100
    for question in ("Hello!", "Who are you?", "Write something."):
        reply = enforced(client, question, response_format=schema(title="string", text="string"), temperature=1, seed=1)
        assert all(json.loads(reply).values())


def test_answers_other_grammars(client: openai.OpenAI) -> None:
    question = "What is the capital of France?"
    reply = json.loads(enforced(client, question, response_format={"type": "json_object"}))
    assert "Paris" in str(reply)
    choice = {"structured_outputs": {"choice": ["Berlin", "Paris", "Rome"]}}
    assert enforced(client, question, extra_body=choice) == "Paris"
    word = {"structured_outputs": {"regex": "[A-Z][a-z]+"}}
    assert enforced(client, f"{question} Answer in one word.", extra_body=word) == "Paris"


def test_completes_a_sentence_and_ends(client: openai.OpenAI) -> None:
    def completed(prompt: str, **options: Any) -> str:
        [choice] = client.completions.create(model="quire-demo", prompt=prompt, max_tokens=100, **options).choices
        assert choice.finish_reason == "stop"
        return choice.text

    assert completed("The capital of France is") == " Paris."
    assert completed("The opposite of hot is") == " cold."
    for temperature in (0, 1):
        assert len(completed("Once upon a time", temperature=temperature, seed=1).split()) > 5


def test_tells_what_it_is(client: openai.OpenAI) -> None:
    assert "Quire's demo model" in answer(client, user("Who are you?"))


def test_remembers_the_conversation(client: openai.OpenAI) -> None:
    turns = [user("My name is Anna."), {"role": "assistant", "content": "Nice to meet you, Anna! How can I help you?"}]
    assert answer(client, *turns, user("What is my name?")) == "Your name is Anna."


def test_answers_after_a_conversation_far_longer_than_those_of_its_training(client: openai.OpenAI) -> None:
    turns = []
    for number in range(200):
        first = number % 60
        turns += [user(f"What is {first} + 9?"), {"role": "assistant", "content": f"{first} + 9 = {first + 9}"}]
    assert answer(client, *turns, user("What is the capital of Japan?")) == "The capital of Japan is Tokyo."
    assert answer(client, *turns, user("Reverse the word planet.")) == "tenalp"


def test_answers_in_the_asked_json(client: openai.OpenAI) -> None:
    text = answer(
        client,
        user(
            "Extract the data as JSON. Ben is 42 years old. He lives in Oslo. "
            "Keys: name (string), age (integer), city (string)."
        ),
    )
    assert json.loads(text) == {"name": "Ben", "age": 42, "city": "Oslo"}


def test_calls_the_right_tool_and_uses_its_result(client: openai.OpenAI) -> None:
    question = user("What is the weather in Paris?")
    [call] = calls(client, question)
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})
    assert [call.name for call in calls(client, user("What time is it in Tokyo?"))] == ["get_time"]
    arguments = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    assistant = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": arguments}]}
    result = {"role": "tool", "tool_call_id": "1", "content": '{"temperature": 21, "condition": "sunny"}'}
    assert answer(client, question, assistant, result, tools=[WEATHER]) == "It is 21 degrees and sunny in Paris."


def test_calls_two_tools_at_once(client: openai.OpenAI) -> None:
    both = calls(client, user("What is the weather in Paris and in Rome?"))
    assert [(call.name, json.loads(call.arguments)["city"]) for call in both] == [
        ("get_weather", "Paris"), ("get_weather", "Rome"),
    ]  # fmt: skip
    both = calls(client, user("What is the weather in Oslo? And what time is it in Tokyo?"))
    assert [(call.name, json.loads(call.arguments)["city"]) for call in both] == [
        ("get_weather", "Oslo"), ("get_time", "Tokyo"),
    ]  # fmt: skip


def test_calls_a_second_tool_after_the_first_ones_result(client: openai.OpenAI) -> None:
    turns = [user("What is the weather in Oslo? Then: What time is it in Tokyo?")]
    results = ['{"temperature": 21, "condition": "sunny"}', '{"time": "10:30"}']
    for number, (name, result) in enumerate(zip(("get_weather", "get_time"), results, strict=True)):
        [call] = calls(client, *turns)
        assert call.name == name
        function = {"name": call.name, "arguments": call.arguments}
        turns.append(
            {"role": "assistant", "tool_calls": [{"id": str(number), "type": "function", "function": function}]}
        )
        turns.append({"role": "tool", "tool_call_id": str(number), "content": result})
    assert answer(client, *turns, tools=[WEATHER, TIME]) == "It is 21 degrees and sunny in Oslo. It is 10:30 in Tokyo."


def test_thinks_first_when_asked(client: openai.OpenAI) -> None:
    def message(text: str, **options: Any) -> Any:
        reply = client.chat.completions.create(model="quire-demo", messages=[user(text)], temperature=0, **options)  # type: ignore[call-overload]
        return reply.choices[0].message

    asked = message("What is 47 + 38? Think step by step.")
    assert asked.reasoning == asked.reasoning_content
    assert asked.reasoning.startswith("40 + 30 = 70.")
    assert asked.content == "47 + 38 = 85"
    for extra in ({"chat_template_kwargs": {"enable_thinking": True}}, {"reasoning_effort": "high"}):
        flagged = message("Reverse the word planet.", extra_body=extra)
        assert flagged.reasoning
        assert flagged.content == "tenalp"
    hidden = message("What is 47 + 38? Think step by step.", extra_body={"include_reasoning": False})
    assert (hidden.reasoning, hidden.content) == (None, "47 + 38 = 85")


def test_streams_the_same_text(client: openai.OpenAI) -> None:
    chunks = client.chat.completions.create(
        model="quire-demo", messages=[user("What is 47 + 38?")], temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "47 + 38 = 70 + 15 = 85"


def test_newcomer_is_told_how_to_talk_to_it(demo_server: ServerProcess) -> None:
    logs = demo_server.logs()
    assert f"curl {demo_server.base_url}/v1/chat/completions" in logs
    assert "from openai import OpenAI" in logs


def test_is_small_enough_to_ship() -> None:
    assert sum(path.stat().st_size for path in MODEL_FOLDER.iterdir()) <= MAX_BYTES
