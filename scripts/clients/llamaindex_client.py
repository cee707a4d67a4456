"""LlamaIndex's OpenAILike: answers, streams, a function agent and a typed answer."""

import asyncio
import os

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def get_weather(city: str) -> str:
    """Get the current weather in a city"""
    return '{"temperature": 21, "condition": "sunny"}'


model = OpenAILike(
    model="quire-demo",
    api_base=os.environ["QUIRE_URL"] + "/v1",
    api_key="none",
    is_chat_model=True,
    is_function_calling_model=True,
    context_window=8192,
    temperature=0,
    max_tokens=200,
    max_retries=0,
)
question = [ChatMessage(role="user", content="What is the capital of France?")]
assert model.chat(question).message.content == "The capital of France is Paris."
assert "".join(part.delta or "" for part in model.stream_chat(question)) == "The capital of France is Paris."

extract = "Extract the data as JSON. Ben is 42 years old. Keys: name (string), age (integer)."
person = model.as_structured_llm(Person).chat([ChatMessage(role="user", content=extract)]).raw
assert isinstance(person, Person), person


async def agent() -> str:
    return str(await FunctionAgent(tools=[get_weather], llm=model).run("What is the weather in Paris?"))


assert asyncio.run(agent()) == "It is 21 degrees and sunny in Paris."
