"""The helper's own side: answers one question after another within limits, and ends with its parent."""

import contextlib
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator

import psutil

_NICE = 10
_LARGE_BYTES = 512 * 2**20


@contextlib.contextmanager
def limited(num_bytes: int, cpu_seconds: float) -> Iterator[None]:
    """Limits the `with` block to `num_bytes` more memory, and ends the process after `cpu_seconds` in it.

    An allocation past the limit fails. The processor time of all threads counts; time before the block does not, nor
    does waiting for a busy core. The operating system ends the process by SIGPROF. RLIMIT_CPU would count whole
    seconds, and leave a core dump.
    """
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + num_bytes, resource.RLIM_INFINITY))
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def held_bytes() -> int:
    """The memory of the process."""
    return psutil.Process().memory_info().rss


def is_large(own_bytes: int = 0) -> bool:
    """Returns True if the process holds so much memory that another one should take its place.

    Args:
        own_bytes: what another one would hold, too.
    """
    return held_bytes() > own_bytes + _LARGE_BYTES


def run_helper(serve: Callable[[socket.socket], None]) -> None:
    """Runs `serve` on the socket to the parent until the parent closes it, below the priority of running requests."""
    os.nice(_NICE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(EOFError, ConnectionError), socket.socket(fileno=sys.stdin.fileno()) as connection:
        serve(connection)
