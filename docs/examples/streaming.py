"""An answer that is printed while the model writes, and how many tokens it took."""

import os

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("OPENAI_BASE_URL", "http://localhost:8000/v1"), api_key="none")
stream = client.chat.completions.create(
    model="quire-demo",
    messages=[{"role": "user", "content": "What is the capital of France?"}],
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    else:  # the last chunk
        print(f"\n{chunk.usage.prompt_tokens} tokens in, {chunk.usage.completion_tokens} tokens out")
