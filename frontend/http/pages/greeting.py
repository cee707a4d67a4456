"""The examples that `quire serve` prints once the server is ready, for a newcomer to paste."""


def curl_example(url: str, model: str, *, needs_key: bool) -> str:
    """A request as a shell command, for a server at `url` (without /v1)."""
    header = "-H 'Authorization: Bearer YOUR_KEY' " if needs_key else ""
    return f"""curl {url}/v1/chat/completions {header}-H 'Content-Type: application/json' \\
    -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "What is the capital of France?"}}]}}'"""


def vectors_example(url: str, model: str, *, needs_key: bool) -> str:
    """A request for a vector as a shell command, for a server at `url` (without /v1)."""
    header = "-H 'Authorization: Bearer YOUR_KEY' " if needs_key else ""
    return f"""curl {url}/v1/embeddings {header}-H 'Content-Type: application/json' \\
    -d '{{"model": "{model}", "input": "What is the capital of France?"}}'"""


def greeting(url: str, model: str, *, needs_key: bool, task: str = "generate") -> str:
    """A curl line and a Python snippet for a server at `url` (without /v1).

    Args:
        task: the first that the model serves.
    """
    if task != "generate":
        example = f"\nTry it:\n\n  {vectors_example(url, model, needs_key=needs_key)}\n" if task == "embed" else ""
        return f"{example}\nCtrl-C stops the server; {url}/docs lists its routes.\n"
    key = "YOUR_KEY" if needs_key else "none"
    return f"""
Try it:

  {curl_example(url, model, needs_key=needs_key)}

or, after `pip install openai`:

  from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key="{key}")
  messages = [{{"role": "user", "content": "What is 27 + 15?"}}]
  print(client.chat.completions.create(model="{model}", messages=messages).choices[0].message.content)

or `quire chat{"" if url.endswith(":8000") else f" --url {url}/v1"}` in another terminal. Ctrl-C stops the server.
"""
