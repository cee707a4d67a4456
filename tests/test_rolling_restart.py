"""Two servers behind a proxy are replaced one after the other, and no request is lost."""

import asyncio
import json
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.servers import ServerProcess, program_with

pytestmark = pytest.mark.turns(4, among="whole systems")

NUM_TOKENS = 600
"""Some seconds of a worker that takes 2 ms and more for a step."""
BODY = {"model": "tiny", "prompt": [5, 6], "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}


class Proxy:
    """Sends each request to the next server. One that refuses it, before it has answered, is followed by another."""

    def __init__(self) -> None:
        self.ports: list[int] = []
        self._turn = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        [length] = re.findall(rb"content-length: (\d+)", head.lower())
        request = head + await reader.readexactly(int(length))
        for _ in range(2 * len(self.ports)):
            self._turn += 1
            try:
                theirs, ours = await asyncio.open_connection("127.0.0.1", self.ports[self._turn % len(self.ports)])
                ours.write(request)
                part = await theirs.read(1 << 16)
            except OSError:
                continue
            if not part or part.startswith(b"HTTP/1.1 503"):
                continue
            while part:
                writer.write(part)
                part = await theirs.read(1 << 16)
            break
        writer.close()


async def stream(url: str) -> str | None:
    """The reason for the end of one answer."""
    reason = None
    async with (
        httpx.AsyncClient(timeout=100) as client,
        client.stream("POST", url, json=BODY, headers={"connection": "close"}) as answer,
    ):
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "choices" in event, event
                [choice] = event["choices"]
                reason = choice["finish_reason"] or reason
    return reason


@pytest.mark.parametrize("count", ["1", "2"])
def test_servers_are_replaced_and_no_request_is_lost(
    checkpoint: Callable[..., Path], tmp_path: Path, count: str
) -> None:
    def start() -> ServerProcess:
        return ServerProcess(
            tmp_path, str(checkpoint("llama", max_position_embeddings=2048)), "--served-model-name", "tiny",
            "--shutdown-timeout", "90", "--api-server-count", count,
            program=program_with("tests.executor.doubles:PoisonWorker"),
            env={"POISON": "raise", "PYTHONPATH": str(Path(__file__).parents[1])},
        )  # fmt: skip

    async def scenario() -> None:
        proxy, tasks = Proxy(), []
        listening = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1/completions"
        proxy.ports = [server.port for server in old]
        for server, replacement in zip(old, new, strict=True):
            tasks += [asyncio.create_task(stream(url)) for _ in range(6)]
            await asyncio.sleep(0.5)
            server.process.send_signal(signal.SIGTERM)
            tasks += [asyncio.create_task(stream(url)) for _ in range(6)]
            assert await asyncio.to_thread(server.process.wait, 100) == 0
            proxy.ports[proxy.ports.index(server.port)] = replacement.port
        assert set(await asyncio.gather(*tasks)) == {"length"}
        listening.close()

    old, new = [start(), start()], [start(), start()]
    try:
        for server in old + new:
            server.wait_until_ready()
        asyncio.run(scenario())
    finally:
        for server in old + new:
            server.stop()


def accepts(server: ServerProcess) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", server.port)) == 0


def test_a_second_signal_does_not_wait_for_streams(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    server = ServerProcess(
        tmp_path, str(checkpoint("llama", max_position_embeddings=70_000)), "--served-model-name", "tiny",
        "--shutdown-timeout", "600", program=program_with("tests.executor.doubles:PoisonWorker"),
        env={"POISON": "raise", "PYTHONPATH": str(Path(__file__).parents[1])},
    ).wait_until_ready()  # fmt: skip
    url = f"{server.base_url}/v1/completions"
    with httpx.stream("POST", url, json=BODY | {"max_tokens": 60_000}, timeout=60) as answer:
        next(answer.iter_lines())
        server.process.send_signal(signal.SIGTERM)
        while accepts(server):
            pass
        assert server.process.poll() is None
        assert server.stop() == 0
