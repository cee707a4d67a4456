"""What a request brought is freed with its end: no cycle of references waits for a garbage collection with it."""

import asyncio
import contextlib
import gc
import http.client
import json
import resource
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.frontend.async_llm import AsyncLLM
from quire.frontend.http.connections.listener import bind
from quire.frontend.http.server import HttpServer
from quire.frontend.http.server_config import ServerConfig
from quire.frontend.launch.launcher import EngineLauncher
from tests.core.engine.null_engine import NULL_WORKER

LARGE = 150_000
TEXT = "word " * (LARGE // 5)
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 1}
SHORT = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
CUT = {"truncate_prompt_tokens": 5, "max_tokens": 1}


class Server:
    """A server in this process, whose loop runs during calls alone."""

    def __init__(self, path: Path) -> None:
        self._runner = asyncio.Runner()
        server = ServerConfig(host="127.0.0.1", port=0, uvicorn_log_level="warning")
        listener = bind(server)
        self.port: int = listener.getsockname()[1]
        engine = AsyncLLM.from_engine_args(
            model=str(path),
            served_model_name=["tiny"],
            enable_prompt_embeds=True,
            max_num_seqs=1,
            max_num_queued_reqs=4,
        )
        self._server = HttpServer(engine, server, listener, greet=False)
        self._runner.run(self._start())

    async def _start(self) -> None:
        self._task = asyncio.create_task(self._server.run())
        while True:
            done, _ = await asyncio.wait([self._task], timeout=0.05)
            assert not done
            if (await self._ask("GET", "/health", b""))[0] == 200:
                return

    async def _ask(self, method: str, path: str, body: bytes, **headers: str) -> tuple[int, bytes]:
        def ask() -> tuple[int, bytes]:
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
                connection.request(method, path, body, {"Content-Type": "application/json", **headers})
                answer = connection.getresponse()
                return answer.status, answer.read()

        return await asyncio.to_thread(ask)

    def post(self, path: str, body: bytes, **headers: str) -> tuple[int, bytes]:
        """Status and body of an answer, once the server has forgotten the connection."""

        async def post() -> tuple[int, bytes]:
            answer = await self._ask("POST", path, body, **headers)
            await asyncio.sleep(0.01)
            return answer

        return self._runner.run(post())

    def leave(self, sent: bytes) -> None:
        """Sends the beginning of a request, and hangs up once it is being read or answered."""

        async def leave() -> None:
            with socket.create_connection(("127.0.0.1", self.port)) as raw:
                await asyncio.to_thread(raw.sendall, sent)
                await asyncio.sleep(0.2)
            await asyncio.sleep(0.1)

        self._runner.run(leave())

    def stop(self) -> None:
        async def stop() -> None:
            self._server.stop()
            await self._task

        self._runner.run(stop())
        self._runner.close()


@pytest.fixture(scope="module")
def server(checkpoint: Callable[..., Path]) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(EngineLauncher.__init__.__kwdefaults__, "worker_factory", NULL_WORKER)
        started = Server(checkpoint("llama"))
        yield started
        started.stop()


@contextlib.contextmanager
def nothing_large_in_cycles() -> Iterator[None]:
    """Checks that what becomes garbage meanwhile, and is in a cycle or hangs on one, is small."""
    gc.collect()
    gc.disable()
    try:
        yield
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found = [type(owner).__name__ for owner in gc.garbage for each in gc.get_referents(owner) if is_large(each)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not found


def is_large(each: object) -> bool:
    return isinstance(each, str | bytes | bytearray | list) and len(each) > LARGE // 4


REFUSED: dict[str, tuple[str, Any, int]] = {
    "a text": ("/v1/completions", {"prompt": TEXT}, 400),
    "texts": ("/v1/completions", {"prompt": [TEXT, TEXT]}, 400),
    "ids": ("/v1/completions", {"prompt": [5] * LARGE}, 400),
    "lists of ids": ("/v1/completions", {"prompt": [[5], [5] * LARGE]}, 400),
    "unknown ids": ("/v1/completions", {"prompt": [10**9] * LARGE, **CUT}, 400),
    "a stream": ("/v1/completions", {"prompt": TEXT, "stream": True}, 400),
    "beams": ("/v1/completions", {"prompt": TEXT, "use_beam_search": True, "n": 2}, 400),
    "an engine's failure": (  # its worker has no log-probabilities
        *("/v1/completions", {"prompt": "a", "user": TEXT, "max_tokens": 2, "use_beam_search": True, "n": 2}, 500),
    ),
    "a suffix": ("/v1/completions", {"prompt": "a", "suffix": TEXT}, 400),
    "embeddings": ("/v1/completions", {"prompt_embeds": TEXT}, 400),
    "a type": ("/v1/completions", {"prompt": TEXT, "temperature": "hot"}, 400),
    "half": ("/v1/completions", json.dumps({"prompt": TEXT})[:-9].encode(), 400),
    "bad UTF-8": ("/v1/completions", b'{"prompt": "' + TEXT.encode() + b'\xff"}', 400),
    "a model": ("/v1/completions", {"prompt": TEXT, "model": "none"}, 404),
    "overload": ("/v1/completions", {"prompt": ["a"] * 100, "user": TEXT, "max_tokens": 1000}, 429),
    "a chat": ("/v1/chat/completions", CHAT, 400),
    "a chat's stream": ("/v1/chat/completions", {**CHAT, "stream": True}, 400),
    "chats": ("/v1/chat/completions/batch", {"messages": [CHAT["messages"], SHORT["messages"]]}, 400),
    "a schema": ("/v1/completions", {"prompt": "a", "structured_outputs": {"choice": [TEXT * 3]}}, 400),
    "a rendering": ("/v1/chat/completions/render", CHAT, 400),
    "a response": ("/v1/responses", {"input": TEXT}, 400),
    "a response's stream": ("/v1/responses", {"input": TEXT, "stream": True}, 400),
    "a job": ("/v1/responses", {"input": TEXT, "background": True}, 400),
    "a message": ("/v1/messages", CHAT, 400),
    "a message's stream": ("/v1/messages", {**CHAT, "stream": True}, 400),
    "a message's tokens": ("/v1/messages/count_tokens", CHAT, 400),
    "a text's tokens": ("/tokenize", {"prompt": TEXT * 8}, 400),
    "a tokens' text": ("/detokenize", {"tokens": [10**9] * LARGE}, 400),
    "generate": ("/inference/v1/generate", {"token_ids": [5] * LARGE, "sampling_params": {"max_tokens": 1}}, 400),
    "an invocation": ("/invocations", {"prompt": TEXT}, 400),
    "an invocation of nothing": ("/invocations", {"user": TEXT}, 400),
    "a route": ("/v1/nothing", {"prompt": TEXT}, 404),
    "a method": ("/v1/models", {"prompt": TEXT}, 405),
    "a size": ("/v1/completions", b" " * (9 << 20), 413),
}
ACCEPTED: dict[str, tuple[str, Any]] = {
    "a text": ("/v1/completions", {"prompt": TEXT, **CUT}),
    "ids": ("/v1/completions", {"prompt": [5] * LARGE, **CUT}),
    "a stream": ("/v1/completions", {"prompt": TEXT, **CUT, "stream": True}),
    "texts": ("/v1/completions", {"prompt": ["a", "b"], "user": TEXT, "max_tokens": 1}),
    "a chat": ("/v1/chat/completions", {**CHAT, **CUT}),
    "a chat's stream": ("/v1/chat/completions", {**CHAT, **CUT, "stream": True}),
    "chats": ("/v1/chat/completions/batch", {"messages": [SHORT["messages"]] * 2, "user": TEXT, "max_tokens": 1}),
    "a response": ("/v1/responses", {"input": "a", "user": TEXT, "max_output_tokens": 1, "store": False}),
    "a message": ("/v1/messages", {**SHORT, "metadata": {"user_id": TEXT}}),
    "a text's tokens": ("/tokenize", {"prompt": "a", "user": TEXT}),
}


def encoded(body: Any) -> bytes:
    return body if isinstance(body, bytes) else json.dumps(body).encode()


@pytest.mark.parametrize("connection", ["keep-alive", "close"])
@pytest.mark.parametrize("case", REFUSED)
def test_refused_bodies_are_freed(server: Server, case: str, connection: str) -> None:
    path, body, status = REFUSED[case]
    server.post(path, encoded(body))  # what a first request alone makes
    with nothing_large_in_cycles():
        answered, text = server.post(path, encoded(body), Connection=connection)
    assert answered == status, text[:500]


@pytest.mark.parametrize("case", ACCEPTED)
def test_accepted_bodies_are_freed(server: Server, case: str) -> None:
    path, body = ACCEPTED[case]
    server.post(path, encoded(body))
    with nothing_large_in_cycles():
        status, text = server.post(path, encoded(body))
    assert status == 200, text[:500]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_bodies_of_clients_that_leave_are_freed(server: Server, path: str, stream: bool) -> None:
    body = encoded({**SHORT, "max_tokens": 1500, "prompt": "a", "input": "a", "user": TEXT, "stream": stream})
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with nothing_large_in_cycles():
        server.leave(head.encode() + body)
        server.leave(head.encode() + body[:-1000])


@pytest.mark.parametrize("prompt", ["word " * 1_200_000, [5] * 500_000], ids=["text", "ids"])
def test_refusals_take_no_memory_that_stays(server: Server, prompt: str | list[int]) -> None:
    """As read, 20 bodies have more than 100 MB; collections never come."""
    body = encoded({"prompt": prompt})
    gc.collect()
    gc.disable()
    try:
        for number in range(25):
            if number == 5:
                before = resident_bytes()
            assert server.post("/v1/completions", body)[0] == 400
        assert resident_bytes() - before < 50e6
    finally:
        gc.enable()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
