"""LangChain's ChatOpenAI: answers, streams, tools, an agent and structured output, with chat and with responses."""

import os

from langchain.agents import create_agent
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


@tool
def get_weather(city: str) -> str:
    """Get the current weather in a city"""
    return '{"temperature": 21, "condition": "sunny"}'


class Sum(BaseModel):
    """A sum."""

    total: int


for use_responses in (False, True):
    model = ChatOpenAI(
        model="quire-demo",
        base_url=os.environ["QUIRE_URL"] + "/v1",
        api_key="none",
        temperature=0,
        max_retries=0,
        max_tokens=200,
        use_responses_api=use_responses,
    )
    answer = model.invoke("What is the capital of France?")
    assert answer.text == "The capital of France is Paris.", answer
    assert "".join(chunk.text for chunk in model.stream("What is the capital of France?")) == answer.text

    with_tools = model.bind_tools([get_weather])
    turns = [HumanMessage("What is the weather in Paris?")]
    turns.append(with_tools.invoke(turns))
    [call] = turns[-1].tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"}), call
    turns.append(ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"]))
    assert with_tools.invoke(turns).text == "It is 21 degrees and sunny in Paris."

    agent = create_agent(model, tools=[get_weather])
    turns = agent.invoke({"messages": [HumanMessage("What is the weather in Paris?")]})["messages"]
    assert turns[-1].text == "It is 21 degrees and sunny in Paris.", turns

    for method in ("json_schema", "function_calling"):
        structured = model.with_structured_output(Sum, method=method)
        assert isinstance(structured.invoke("What is 47 + 38?"), Sum)
