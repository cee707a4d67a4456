"""A function that the demo model can call, and the model's answer from its result."""

from typing import Any

WEATHER_FUNCTION: dict[str, Any] = {
    "name": "get_weather",
    "description": "Get the current weather in a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "The name of the city"}},
        "required": ["city"],
    },
}
QUESTION = "What is the weather in Paris?"
RESULT = '{"temperature": 21, "condition": "sunny"}'
REPLY = "It is 21 degrees and sunny in Paris."


def asked(city: str) -> dict[str, str]:
    """Arguments of the call."""
    return {"city": city}
