"""Lets a run be cut by SIGINT or SIGTERM: what it has counted until then is kept, and printed."""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_until_cut(work: Coroutine[Any, Any, None]) -> int | None:
    """Runs `work`, which keeps its counts elsewhere. Returns the signal that cut it; None if it came to its end."""
    return asyncio.run(_until_cut(work))


async def _until_cut(work: Coroutine[Any, Any, None]) -> int | None:
    loop, task = asyncio.get_running_loop(), asyncio.create_task(work)
    cut: list[int] = []

    def on_signal(number: int) -> None:
        cut.append(number)
        task.cancel()

    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    try:
        await task
    except asyncio.CancelledError:
        if not cut:
            raise
    return cut[0] if cut else None


def exit_code(cut: int | None, *, is_clean: bool) -> int:
    """The code of a run: 1 if it found anything, else that of the signal which cut it."""
    if not is_clean:
        return 1
    return 0 if cut is None else 128 + cut
