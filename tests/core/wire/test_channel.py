"""Messages over a real socket."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from quire.core.wire import channel
from quire.core.wire.channel import CurveKeys, bind_router, connect_dealer
from tests.servers import free_port


def test_a_message_that_cannot_be_handled_does_not_hold_up_the_others(tmp_path: Path) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        unhandled: list[BaseException | None] = []
        loop.set_exception_handler(lambda _, context: unhandled.append(context.get("exception")))
        seen: list[bytes] = []
        done = asyncio.Event()

        def on_message(frames: list[bytes]) -> None:
            seen.append(frames[-1])
            if len(seen) == 1:
                raise ValueError("not this one")
            if len(seen) == 3:
                done.set()

        address = f"ipc://{tmp_path}/socket"
        router = bind_router(address, None, on_message)
        dealer = connect_dealer(address, None, lambda frames: None)
        for payload in (b"1", b"2", b"3"):
            dealer.send([payload])
        async with asyncio.timeout(60):
            await done.wait()
        assert seen == [b"1", b"2", b"3"]
        assert [str(error) for error in unhandled] == ["not this one"]
        dealer.close()
        router.close()

    asyncio.run(scenario())


def test_a_connection_that_nobody_answers_is_given_up_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "CONNECT_SECONDS", 0.1)

    async def scenario() -> None:
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.socket())
            listener.bind(("127.0.0.1", 0))
            listener.listen(0)
            place = listener.getsockname()
            for _ in range(2):  # nobody takes these, and so the system answers nobody else
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(place)
            others = attempts(place)
            dealer = connect_dealer(f"tcp://127.0.0.1:{place[1]}", None, lambda frames: None, on_rebuff=lambda: None)
            seen: set[int] = set()
            async with asyncio.timeout(30):
                while len(seen) < 2:
                    seen |= attempts(place) - others
                    await asyncio.sleep(0.01)
            dealer.close()

    asyncio.run(scenario())


def attempts(place: tuple[str, int]) -> set[int]:
    """Ports of this process's connections to `place` that are not answered."""
    found = psutil.Process().net_connections("tcp")
    return {each.laddr.port for each in found if each.raddr == place and each.status == psutil.CONN_SYN_SENT}


def test_a_port_is_free_as_soon_as_its_router_is_closed() -> None:
    async def scenario() -> None:
        keys, address = CurveKeys.generate(), f"tcp://127.0.0.1:{free_port()}"
        for _ in range(60):
            came = asyncio.Event()
            router = bind_router(address, keys, lambda frames, came=came: came.set())  # type: ignore[misc]
            dealer = connect_dealer(address, keys, lambda frames: None)
            dealer.send([b"1"])
            async with asyncio.timeout(30):
                await came.wait()
            router.close(linger_ms=500)
            dealer.close()

    asyncio.run(scenario())


def test_a_channel_that_closes_while_handshakes_fail_stalls_no_other_one() -> None:
    async def rebuff(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            await reader.read(1)
        writer.close()

    async def scenario() -> None:
        server = await asyncio.start_server(rebuff, "127.0.0.1", 0)
        place = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        came = asyncio.Event()
        router = bind_router("ipc://@quire-test-" + os.urandom(8).hex(), None, lambda frames: came.set())
        keys = CurveKeys.generate()
        for number in range(500):
            channels = [connect_dealer(place, keys, lambda frames: None, on_rebuff=lambda: None) for _ in range(4)]
            await asyncio.sleep(number % 10 * 2e-4)
            for each in channels:
                each.close()
        dealer = connect_dealer(router.address, None, lambda frames: None)
        dealer.send([b"1"])
        async with asyncio.timeout(10):
            await came.wait()
        dealer.close()
        router.close()
        server.close()

    asyncio.run(scenario())


def test_a_router_that_nobody_closed_holds_up_neither_garbage_collection_nor_the_end() -> None:
    leave = (
        "import asyncio, gc\nfrom quire.core.wire.channel import CurveKeys, bind_router\n"
        "async def leave(): bind_router('tcp://127.0.0.1:*', CurveKeys.generate(), print)\n"
        "asyncio.run(leave())\ngc.collect()\n"
    )
    subprocess.run([sys.executable, "-c", leave], check=True, timeout=20)
