"""Reads files with a limit of time, because a network's storage may never answer."""

import asyncio
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class FileReads:
    """Runs functions that read files on a few threads of its own.

    A thread that waits for storage cannot be ended. Such a thread is left behind, so that others who use threads never
    lack one, and the process can end. Until its function returns, questions about the same files fail at once.

    Args:
        seconds: that a function may take, the wait for a thread included.
        num_threads: the most functions at once.
        begin: called first on each thread.
    """

    def __init__(self, seconds: float, *, num_threads: int = 4, begin: Callable[[], None] = lambda: None) -> None:
        self._seconds = seconds
        self._num_threads = num_threads
        self._begin = begin
        self._num_started = 0
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._late: dict[Hashable, Future[Any]] = {}

    def read(self, files: Hashable, function: Callable[[], T]) -> T:
        """Returns what `function` does. Blocks.

        Args:
            files: names what it reads.

        Raises:
            TimeoutError: it took too long, or an earlier function for the same files still does.
        """
        future = self._submit(files, function)
        done, _ = wait([future], self._seconds)
        if done:
            return future.result()
        self._leave(files, future)
        raise self._error()

    async def ask(self, files: Hashable, function: Callable[[], T]) -> T:
        """The same for an event loop, which it does not block."""
        future = self._submit(files, function)
        answer = asyncio.wrap_future(future)
        try:
            done, _ = await asyncio.wait([answer], timeout=self._seconds)
        except asyncio.CancelledError:  # nobody waits any more, which says nothing about the files
            answer.cancel()
            raise
        if done:
            return answer.result()
        answer.cancel()
        self._leave(files, future)
        raise self._error()

    def _submit(self, files: Hashable, function: Callable[[], T]) -> "Future[T]":
        if (late := self._late.get(files)) is not None:
            if not late.done():
                raise self._error()
            del self._late[files]
        future: Future[T] = Future()
        self._jobs.put((future, function))
        if self._num_started < self._num_threads:
            self._num_started += 1
            threading.Thread(target=self._work, name="files", daemon=True).start()
        return future

    def _leave(self, files: Hashable, future: "Future[Any]") -> None:
        """Gives up a function: it is not begun any more, or remembered until it returns."""
        if not future.cancel() and not future.done():
            self._late[files] = future

    def _error(self) -> TimeoutError:
        return TimeoutError(
            f"the files were not read in {self._seconds:g} s; their storage does not answer, or slowly."
        )

    def _work(self) -> None:
        self._begin()
        while True:
            future, function = self._jobs.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)
            del future, function  # so that nothing is kept while it waits for the next
