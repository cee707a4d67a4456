"""The end of a server's process."""

import os
import threading

EXIT_SECONDS = 0.5
"""Time for the interpreter to end by itself after the server's end."""


def exit_soon() -> None:
    """Ends the process in `EXIT_SECONDS`, if it still runs.

    Every request has its answer by then, but a thread may still tokenize a long text of a cancelled request. Nothing
    can interrupt the thread, and both the event loop and the interpreter would wait for it.
    """
    timer = threading.Timer(EXIT_SECONDS, os._exit, [0])
    timer.daemon = True  # the interpreter does not wait for the timer
    timer.start()
