"""Storage that does not answer."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_HOLDER = """
import fcntl, os, signal, sys
signal.signal(signal.SIGIO, signal.SIG_IGN)
fcntl.fcntl(os.open(sys.argv[1], os.O_RDWR), fcntl.F_SETLEASE, fcntl.F_WRLCK)
print("held", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def hung_file(path: Path) -> Iterator[None]:
    """Whoever opens the file waits until this ends: another process has a lease of it (fcntl(2)). The system takes a
    lease away after /proc/sys/fs/lease-break-time, which is 45 s."""
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        if holder.stdout.readline() != b"held\n":
            pytest.skip("this file system has no leases")
        try:
            yield
        finally:
            holder.stdin.close()
