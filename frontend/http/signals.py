"""Signals that end a server."""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def signal_handlers(stop: Callable[[], None]) -> Iterator[None]:
    """Within this context, SIGTERM and SIGINT call `stop` on the running loop."""
    loop = asyncio.get_running_loop()
    former = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    for each in former:
        loop.add_signal_handler(each, stop)
    try:
        yield
    finally:
        for each, handler in former.items():
            loop.remove_signal_handler(each)  # leaves the system's default, which would end the process with the signal
            signal.signal(each, handler)
