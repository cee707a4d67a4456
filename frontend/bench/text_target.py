"""Requests of a load for text: an answer comes as a stream, whose tokens are timed."""

import time
from typing import Any

import httpx
import msgspec

from quire.frontend.bench.datasets.request import BenchRequest
from quire.frontend.bench.figures import RequestTiming


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None


_chunk_decoder = msgspec.json.Decoder(_Chunk)


class TextTarget(msgspec.Struct, frozen=True):
    """The server's URL and headers, and the fields of every request's body besides prompt and length."""

    url: str
    chat: bool
    headers: dict[str, str]
    body: dict[str, Any]

    def body_of(self, request: BenchRequest) -> bytes:
        """The JSON body of one request."""
        body = self.body | {"max_tokens": request.output_len, "stream": True, "stream_options": {"include_usage": True}}
        if self.chat:
            body["messages"] = [{"role": "user", "content": request.prompt}]
        else:
            body["prompt"] = request.prompt or request.prompt_token_ids
        return msgspec.json.encode(body)

    async def time(self, client: httpx.AsyncClient, request: BenchRequest) -> RequestTiming:
        """Sends a request, and returns its timing."""
        timing = RequestTiming(prompt_tokens=len(request.prompt_token_ids))
        started = last = time.perf_counter()
        try:
            async with client.stream("POST", self.url, content=self.body_of(request)) as response:
                if response.status_code != 200:
                    timing.error = f"{response.status_code}: {(await response.aread()).decode(errors='replace')[:500]}"
                    return timing
                async for line in response.aiter_lines():
                    if not line.startswith("data:") or line.endswith("[DONE]"):
                        continue
                    chunk = _chunk_decoder.decode(line[5:])
                    if chunk.usage is not None:
                        timing.output_tokens = chunk.usage.completion_tokens
                    if not any(choice.text or (choice.delta and choice.delta.content) for choice in chunk.choices):
                        continue
                    now = time.perf_counter()
                    if timing.ttft == 0.0:
                        timing.ttft = now - started
                    else:
                        timing.gaps.append(now - last)
                    last = now
        except (httpx.HTTPError, msgspec.DecodeError) as error:
            timing.error = f"{type(error).__name__}: {error}"
        timing.latency = last - started
        if not timing.error and timing.output_tokens == 0:
            timing.error = "the stream ended without usage or tokens"
        return timing
