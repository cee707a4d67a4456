"""A loop in which the model calls a Python function and answers with its result."""

import json
import os

from openai import OpenAI


def get_weather(city: str) -> str:
    return json.dumps({"temperature": 21, "condition": "sunny"})


FUNCTIONS = {"get_weather": get_weather}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Get the current weather in a city", "parameters": PARAMETERS}

client = OpenAI(base_url=os.environ.get("OPENAI_BASE_URL", "http://localhost:8000/v1"), api_key="none")
conversation = [{"role": "user", "content": "What is the weather in Paris?"}]
while True:
    answer = client.chat.completions.create(
        model="quire-demo", messages=conversation, tools=[{"type": "function", "function": WEATHER}]
    )
    message = answer.choices[0].message
    conversation.append(message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True))
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        print("calls", call.function.name, call.function.arguments)
        result = FUNCTIONS[call.function.name](**json.loads(call.function.arguments))
        conversation.append({"role": "tool", "tool_call_id": call.id, "content": result})
print(message.content)
