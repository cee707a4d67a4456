"""An event loop on its own thread ends in order, whatever still runs on it."""

import asyncio

import pytest

from quire.core.errors import QuireError
from quire.frontend.launch.event_loop import EventLoopThread


def test_tasks_that_nobody_waits_for_are_ended_with_the_loop(capfd: pytest.CaptureFixture[str]) -> None:
    thread = EventLoopThread("test")
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0)  # cleaning up may need the loop
            ended.append("work")

    async def start() -> asyncio.Task[None]:
        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        return task

    task = thread.run(start())
    thread.close()
    assert ended == ["work"]
    assert task.cancelled()
    del task
    assert capfd.readouterr().err == ""
    with pytest.raises(QuireError, match="make another"):
        thread.run(asyncio.sleep(0))
