"""A program at a terminal of its own, which a test types into and reads."""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time

WAIT_SECONDS = 60.0
PROMPT = "\x1b[?2004h"
"""What tells a terminal to mark pastes, which is when the program begins to read a message."""


class Terminal:
    """`quire ARGUMENTS` on a pseudo-terminal."""

    def __init__(self, *arguments: str, columns: int = 80, env: dict[str, str] | None = None) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "quire", *arguments],
            stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, preexec_fn=_take,
            env={name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")}
            | {"TERM": "xterm-256color"} | (env or {}),
        )  # fmt: skip
        os.close(theirs)
        self._seen = ""

    def read_until(self, text: str) -> str:
        """What was written before `text`; the next call goes on after it."""
        deadline = time.monotonic() + WAIT_SECONDS
        while text not in self._seen:
            readable, _, _ = select.select([self._ours], [], [], max(0.0, deadline - time.monotonic()))
            try:
                assert readable, f"no {text!r} in {self._seen!r}"
                self._seen += os.read(self._ours, 4096).decode()
            except OSError:
                raise AssertionError(f"the program ended without {text!r}: {self._seen!r}") from None
        before, self._seen = self._seen.split(text, 1)
        return before

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def close(self) -> None:
        """Ends the program, if it still runs."""
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


def _take() -> None:
    os.close(os.open(os.ttyname(0), os.O_RDWR))  # makes it the controlling one
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored, and inherited so, where a shell runs the suite with &
