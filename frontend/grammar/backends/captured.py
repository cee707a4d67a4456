"""Captures the text that a C++ library writes to standard error."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def captured_stderr() -> Iterator[Callable[[], list[str]]]:
    """Captures the lines that this process writes to file descriptor 2; call the result after the `with` block."""
    sys.stderr.flush()
    original = os.dup(2)
    memory = os.memfd_create("stderr")
    os.dup2(memory, 2)
    lines: list[str] = []
    try:
        yield lambda: lines
    finally:
        os.dup2(original, 2)
        os.close(original)
        os.lseek(memory, 0, os.SEEK_SET)
        with open(memory, errors="replace") as written:
            lines += written.read(100_000).splitlines()
