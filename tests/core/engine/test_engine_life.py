"""What an engine says before its end. The engine is a socket here, whose process never ends by itself."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from quire.core.engine import engine_life
from quire.core.engine.engine_life import EngineLife
from quire.core.engine.running_engine import RunningEngine
from quire.core.engine.silence import SilenceWatch
from quire.core.errors import NoMemoryError
from quire.core.wire import protocol
from quire.core.wire.channel import bind_router


class EndlessEngine(RunningEngine):
    """Ends when it is killed."""

    def __init__(self, address: str) -> None:
        super().__init__(address, None, 1)
        self.killed = asyncio.Event()

    async def _exit_code(self) -> int:
        await self.killed.wait()
        return -9

    def _kill(self) -> None:
        self.killed.set()


@pytest.mark.parametrize("needs_time", [False, True])
def test_an_engine_that_has_said_why_it_fails_is_not_waited_for(
    needs_time: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it says that it has to do something first."""
    monkeypatch.setattr(engine_life, "FAREWELL_SECONDS", 0.5 if needs_time else 1000.0)
    address, encoder, heard = f"ipc://{tmp_path}/engine", protocol.encoder(), []

    async def scenario() -> None:
        engine = EndlessEngine(address)

        def on_hello(frames: list[bytes]) -> None:
            failed = protocol.EngineFailed("no room", "memory", needs_time)
            channel.send([frames[0], encoder.encode(failed)])
            heard.append(engine.killed.is_set())

        channel = bind_router(address, None, on_hello)
        never: Any = lambda message: pytest.fail("nobody else is told")  # noqa: E731
        life = EngineLife(engine, never)
        async with asyncio.timeout(60):
            end = await life.until_end(SilenceWatch(None, 100.0), lambda: True)
        assert isinstance(end, NoMemoryError)
        assert str(end) == "no room"
        life.close()
        channel.close()

    asyncio.run(scenario())
    assert heard == [False]
