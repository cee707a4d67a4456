"""Requests of a load for text: an answer comes as a stream, whose tokens are timed."""

import base64
import time
from contextlib import AbstractAsyncContextManager
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

    @property
    def shown(self) -> str:
        return self.text or (self.delta.content if self.delta is not None else None) or ""


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
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
            body["messages"] = [{"role": "user", "content": _content(request)}]
        else:
            body["prompt"] = request.prompt or request.prompt_token_ids
        return msgspec.json.encode(body)

    async def time(self, client: httpx.AsyncClient, request: BenchRequest) -> RequestTiming:
        """Sends a request, and returns its timing."""
        timing = RequestTiming(prompt_tokens=len(request.prompt_token_ids))
        usage = await time_stream(client.stream("POST", self.url, content=self.body_of(request)), timing)
        if request.has_media:
            timing.prompt_tokens = usage
        return timing


async def time_stream(stream: AbstractAsyncContextManager[httpx.Response], timing: RequestTiming) -> int:
    """Reads a streamed answer, and notes its times and text in `timing`. Returns the prompt's tokens by its usage."""
    prompt_tokens, texts = 0, []
    started = last = time.perf_counter()
    try:
        async with stream as response:
            if response.status_code != 200:
                timing.error = f"{response.status_code}: {(await response.aread()).decode(errors='replace')[:500]}"
                return 0
            async for line in response.aiter_lines():
                if not line.startswith("data:") or line.endswith("[DONE]"):
                    continue
                chunk = _chunk_decoder.decode(line[5:])
                if chunk.usage is not None:
                    prompt_tokens, timing.output_tokens = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
                if not (text := "".join(choice.shown for choice in chunk.choices)):
                    continue
                texts.append(text)
                now = time.perf_counter()
                if timing.ttft == 0.0:
                    timing.ttft = now - started
                else:
                    timing.gaps.append(now - last)
                last = now
    except (httpx.HTTPError, msgspec.DecodeError) as error:
        timing.error = f"{type(error).__name__}: {error}"
    timing.text = "".join(texts)
    timing.latency = last - started
    if not timing.error and timing.output_tokens == 0:
        timing.error = "the stream ended without usage or tokens"
    return prompt_tokens


def _content(request: BenchRequest) -> str | list[dict[str, Any]]:
    """The content of the user's message."""
    if not request.has_media:
        return request.prompt
    parts = [{"type": "text", "text": request.prompt}, *request.parts]
    if (sound := request.sound) is not None:
        data = {"data": base64.b64encode(sound.data).decode(), "format": sound.name.rpartition(".")[2].lower()}
        parts.append({"type": "input_audio", "input_audio": data})
    return parts
