"""Messages over a real socket."""

import asyncio
import contextlib
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from quire.core.wire import channel
from quire.core.wire.channel import bind_router, connect_dealer


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


def test_a_router_that_nobody_closed_holds_up_neither_garbage_collection_nor_the_end() -> None:
    leave = (
        "import asyncio, gc\nfrom quire.core.wire.channel import CurveKeys, bind_router\n"
        "async def leave(): bind_router('tcp://127.0.0.1:*', CurveKeys.generate(), print)\n"
        "asyncio.run(leave())\ngc.collect()\n"
    )
    subprocess.run([sys.executable, "-c", leave], check=True, timeout=20)
