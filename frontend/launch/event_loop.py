"""An event loop on its own thread, so that blocking code can run asynchronous code, in Jupyter too."""

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

from quire.core.errors import QuireError

T = TypeVar("T")

CLOSE_SECONDS = 5.0


class EventLoopThread:
    """An event loop that runs on a daemon thread until `close`. A daemon thread does not keep the interpreter alive."""

    def __init__(self, name: str) -> None:
        self._process_id = os.getpid()
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """True if the caller is on the loop's thread, where `run` would wait for itself."""
        return threading.current_thread() is self._thread

    @property
    def is_inherited(self) -> bool:
        """True if this process is a fork of the one with the thread: a fork does not inherit threads."""
        return os.getpid() != self._process_id

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` to its end and returns its result. Ctrl-C cancels `work` and waits for its cleanup.

        Raises:
            QuireError: the thread has ended, or is not in this process.
        """
        if self.is_inherited or self._loop.is_closed():
            work.close()
            raise QuireError(
                "This LLM belongs to the process that was forked; make one in this process, or start it by `spawn`."
                if self.is_inherited
                else "This LLM was shut down; make another."
            )
        ended = threading.Event()
        tasks: list[asyncio.Task[T]] = []

        def start() -> None:
            tasks.append(self._loop.create_task(work))
            tasks[0].add_done_callback(lambda task: ended.set())

        self._loop.call_soon_threadsafe(start)
        try:
            ended.wait()
        except BaseException:
            self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())
            ended.wait()
            raise
        return tasks[0].result()

    def close(self) -> None:
        """Cancels running tasks, then ends the loop and its thread. Harmless when called again."""
        if self._loop.is_closed() or self.is_inherited:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        if not self.is_current:
            self._thread.join()
            self._cancel_rest()
            self._loop.close()

    def _cancel_rest(self) -> None:
        """Cancels the remaining tasks and lets them clean up; else Python would warn of each after the loop's end."""
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.wait(tasks, timeout=CLOSE_SECONDS))
