"""Requests of a load for vectors or ranks: an answer comes whole, and its time is the end-to-end latency."""

import time
from typing import Any, Literal

import httpx
import msgspec

from quire.core.errors import ConfigError
from quire.frontend.bench.datasets.request import BenchRequest
from quire.frontend.bench.figures import RequestTiming

VectorBackend = Literal[
    "openai-embeddings", "openai-embeddings-chat", "infinity-embeddings", "vllm-pooling", "vllm-rerank"
]

ENDPOINTS: dict[str, str] = {
    "openai-embeddings": "/v1/embeddings",
    "openai-embeddings-chat": "/v1/embeddings",
    "infinity-embeddings": "/embeddings",
    "vllm-pooling": "/pooling",
    "vllm-rerank": "/rerank",
}


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0


class _Answer(msgspec.Struct):
    usage: _Usage


_decode = msgspec.json.Decoder(_Answer).decode


class VectorTarget(msgspec.Struct, frozen=True):
    """The server's URL and headers, and the fields of every request's body besides its texts."""

    url: str
    backend: VectorBackend
    headers: dict[str, str]
    body: dict[str, Any]

    def body_of(self, request: BenchRequest) -> bytes:
        """The JSON body of one request. Texts that are longer than the server's model reads are cut."""
        body = dict(self.body)
        if self.backend != "infinity-embeddings":  # which cuts texts by itself, and knows no such field
            body["truncate_prompt_tokens"] = -1
        texts = request.texts or [request.prompt]
        match self.backend:
            case "vllm-rerank":
                body |= {"query": texts[0], "documents": texts[1:]}
            case "openai-embeddings-chat":
                body["messages"] = [[{"role": "user", "content": text}] for text in texts]
            case _:
                body["input"] = texts if len(texts) > 1 else texts[0]
        return msgspec.json.encode(body)

    async def time(self, client: httpx.AsyncClient, request: BenchRequest) -> RequestTiming:
        """Sends a request, and returns its timing."""
        timing = RequestTiming(prompt_tokens=0, num_texts=len(request.texts) or 1)
        started = time.perf_counter()
        try:
            answer = await client.post(self.url, content=self.body_of(request))
            timing.ttft = timing.latency = time.perf_counter() - started
            if answer.status_code == 200:
                timing.prompt_tokens = _decode(answer.content).usage.prompt_tokens
            else:
                timing.error = f"{answer.status_code}: {answer.text[:500]}"
        except (httpx.HTTPError, msgspec.DecodeError) as error:
            timing.error = f"{type(error).__name__}: {error}"
        return timing


def batched(requests: list[BenchRequest], size: int, backend: VectorBackend) -> list[BenchRequest]:
    """Requests with `size` texts each. Those for ranks have a query besides, the first text of all.

    Raises:
        ConfigError: there is no text to rank.
    """
    if backend != "vllm-rerank" and size == 1:
        return requests
    query: list[str] = []
    if backend == "vllm-rerank":
        if len(requests) < 2:
            raise ConfigError("--backend vllm-rerank needs --num-prompts of 2 at least: a query and a document.")
        query, requests = [requests[0].prompt], requests[1:]
    return [
        BenchRequest([], 0, texts=query + [each.prompt for each in requests[start : start + size]])
        for start in range(0, len(requests), size)
    ]
