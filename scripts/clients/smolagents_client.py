"""smolagents' OpenAIModel: an answer, a stream, a call that the agent insists on, and a format of the answer."""

import json
import os

from smolagents import ChatMessage, OpenAIModel, tool


@tool
def get_weather(city: str) -> str:
    """Get the current weather in a city

    Args:
        city: The name of the city
    """
    return '{"temperature": 21, "condition": "sunny"}'


def user(text: str) -> list[ChatMessage]:
    return [ChatMessage(role="user", content=[{"type": "text", "text": text}])]


model = OpenAIModel("quire-demo", api_base=os.environ["QUIRE_URL"] + "/v1", api_key="none", max_tokens=200)
france = user("What is the capital of France?")
assert model.generate(france).content == "The capital of France is Paris."
assert "".join(part.content or "" for part in model.generate_stream(france)) == "The capital of France is Paris."

[call] = model.generate(user("What is the weather in Paris?"), tools_to_call_from=[get_weather]).tool_calls
assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"}), call

schema = {
    "type": "object",
    "properties": {"name": {"type": "string"}},
    "required": ["name"],
    "additionalProperties": False,
}
typed = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}
question = "Extract the data as JSON. Ben is 42 years old. Keys: name (string)."
assert json.loads(model.generate(user(question), response_format=typed).content) == {"name": "Ben"}
