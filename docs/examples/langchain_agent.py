"""An agent of LangChain that calls a Python function. (pip install langchain langchain-openai)"""

import os

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def get_weather(city: str) -> str:
    """Get the current weather in a city"""
    return '{"temperature": 21, "condition": "sunny"}'


model = ChatOpenAI(
    model="quire-demo", base_url=os.environ.get("OPENAI_BASE_URL", "http://localhost:8000/v1"), api_key="none"
)
agent = create_agent(model, tools=[get_weather])
result = agent.invoke({"messages": [{"role": "user", "content": "What is the weather in Paris?"}]})
for message in result["messages"]:
    print(f"{message.type}: {message.text or message.tool_calls}")
