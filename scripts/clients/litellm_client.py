"""LiteLLM: OpenAI's protocol and Anthropic's, with whole answers, streams and a tool."""

import json
import os

import litellm

URL = os.environ["QUIRE_URL"]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "Get the current weather in a city", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
RESULT = '{"temperature": 21, "condition": "sunny"}'

for model, base in (("openai/quire-demo", URL + "/v1"), ("anthropic/quire-demo", URL)):
    common = {"model": model, "api_base": base, "api_key": "none", "temperature": 0, "max_tokens": 200}
    france = [{"role": "user", "content": "What is the capital of France?"}]
    whole = litellm.completion(messages=france, **common).choices[0].message.content
    assert whole == "The capital of France is Paris.", whole
    chunks = litellm.completion(messages=france, stream=True, **common)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole

    turns = [{"role": "user", "content": "What is the weather in Paris?"}]
    message = litellm.completion(messages=turns, tools=TOOLS, **common).choices[0].message
    [call] = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
    turns += [message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": RESULT}]
    answer = litellm.completion(messages=turns, tools=TOOLS, **common).choices[0].message.content
    assert answer == "It is 21 degrees and sunny in Paris.", answer
