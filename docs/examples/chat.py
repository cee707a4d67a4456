"""An answer to a conversation of several turns, with OpenAI's client."""

import os

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("OPENAI_BASE_URL", "http://localhost:8000/v1"), api_key="none")
conversation = []
for question in ("What is the capital of France?", "What is the capital of Japan?"):
    conversation.append({"role": "user", "content": question})
    answer = client.chat.completions.create(model="quire-demo", messages=conversation)
    conversation.append({"role": "assistant", "content": answer.choices[0].message.content})
    print(question, "->", answer.choices[0].message.content)
