"""The end of a server: signals that ask for it, and the end of its process."""

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

EXIT_SECONDS = 0.5
"""Time for the interpreter to end by itself after the server's end."""


@contextlib.contextmanager
def signal_handlers(stop: Callable[[], None], reload: Callable[[], None] | None = None) -> Iterator[None]:
    """Within this context, SIGTERM and SIGINT call `stop` on the running loop, and SIGHUP calls `reload`, if given."""
    loop = asyncio.get_running_loop()
    calls = {signal.SIGTERM: stop, signal.SIGINT: stop} | ({} if reload is None else {signal.SIGHUP: reload})
    former = {each: signal.getsignal(each) for each in calls}
    for each, call in calls.items():
        loop.add_signal_handler(each, call)
    try:
        yield
    finally:
        for each, handler in former.items():
            loop.remove_signal_handler(each)  # leaves the system's default, which would end the process with the signal
            signal.signal(each, handler)


def exit_soon() -> None:
    """Ends the process in `EXIT_SECONDS`, if it still runs.

    Every request has its answer by then, but a thread may still tokenize a long text of a cancelled request. Nothing
    can interrupt the thread, and both the event loop and the interpreter would wait for it.
    """
    timer = threading.Timer(EXIT_SECONDS, os._exit, [0])
    timer.daemon = True  # the interpreter does not wait for the timer
    timer.start()
