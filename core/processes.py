"""Waits for the end of this host's processes: single ones, or process groups such as an engine and its workers."""

import asyncio
import atexit
import contextlib
import os
import select
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

_PF_EXITING = 0x4  # Linux, include/linux/sched.h; the flags are field 9 of proc_pid_stat(5)


def leave(code: int) -> NoReturn:
    """Ends this process when its work is done, without waiting for threads.

    The interpreter would free each object, which the system does at once; that took most of a server's shutdown.
    Functions registered with `atexit` run, and stdout and stderr are flushed.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the reader is gone, or it is closed
            stream.flush()
    os._exit(code)


def is_ending(pid: int) -> bool:
    """Returns True if a child, not yet waited for, has begun to end, as far as can be seen. The flag is set before the
    system closes connections and frees memory, which may take seconds."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        state, flags = fields[0], int(fields[6])
        return state in "ZX" or bool(flags & _PF_EXITING)
    return False


def members(group: int) -> list[int]:
    """The process ids of a group. Includes processes that have ended and were not waited for."""
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(ValueError, OSError):  # no process, or none any more
            if os.getpgid(int(name)) == group:
                found.append(int(name))
    return found


def names_of_living(group: int) -> list[str]:
    """The running processes of a group, by id and name, for logs."""
    found = []
    for pid in members(group):
        with contextlib.suppress(OSError), _descriptor(pid) as pidfd:
            if pidfd is not None and not select.select([pidfd], [], [], 0)[0]:
                found.append(f"{pid} ({Path(f'/proc/{pid}/comm').read_text().strip()})")
    return found


async def until_ended(pid: int) -> None:
    """Waits until a process has ended. It need not be a child."""
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    with _descriptor(pid) as pidfd:
        if pidfd is None:
            return
        loop.add_reader(pidfd, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(pidfd)


async def until_group_ended(group: int, seconds: float) -> None:
    """Waits until all processes of a group have ended, for up to `seconds`."""
    with contextlib.suppress(OSError):  # the time is over, or there is no descriptor to wait with
        async with asyncio.timeout(seconds):
            for pid in members(group):
                await until_ended(pid)


def wait_ended(pid: int, seconds: float) -> None:
    """Blocks until a process has ended, for up to `seconds`. For use outside an event loop."""
    with _descriptor(pid) as pidfd:
        if pidfd is not None:
            select.select([pidfd], [], [], max(0.0, seconds))


@contextlib.contextmanager
def _descriptor(pid: int) -> Iterator[int | None]:
    """The pidfd of a process; None if the process has been waited for."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        yield None
        return
    try:
        yield pidfd
    finally:
        os.close(pidfd)
