"""The ends of this host's processes: of one, or of a group that is killed together, as an engine and its workers."""

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
    """Ends this process, whose work is done, and waits for no thread.

    The interpreter's own end takes apart object by object what the system takes back at once; that took longer than all
    else of a server's end. What is registered with `atexit` is called, and what was printed is written.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the reader is gone, or it is closed
            stream.flush()
    os._exit(code)


def is_ending(pid: int) -> bool:
    """Whether a child that has not been waited for has begun to end, as far as can be seen. It has before the system
    closes its connections and frees its memory, which may take seconds."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        state, flags = fields[0], int(fields[6])
        return state in "ZX" or bool(flags & _PF_EXITING)
    return False


def members(group: int) -> list[int]:
    """The ids of a group's processes. Some may have ended, and not been waited for."""
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(ValueError, OSError):  # no process, or none any more
            if os.getpgid(int(name)) == group:
                found.append(int(name))
    return found


def names_of_living(group: int) -> list[str]:
    """For logs: the processes of a group that have not ended, each by its id and name."""
    found = []
    for pid in members(group):
        with contextlib.suppress(OSError), _descriptor(pid) as pidfd:
            if pidfd is not None and not select.select([pidfd], [], [], 0)[0]:
                found.append(f"{pid} ({Path(f'/proc/{pid}/comm').read_text().strip()})")
    return found


async def until_ended(pid: int) -> None:
    """Returns when a process, be it a child or not, has ended."""
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    with _descriptor(pid) as pidfd:
        if pidfd is None:
            return
        loop.add_reader(pidfd, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(pidfd)


def wait_ended(pid: int, seconds: float) -> None:
    """As `until_ended`, where no event loop is held up, for so long at most."""
    with _descriptor(pid) as pidfd:
        if pidfd is not None:
            select.select([pidfd], [], [], max(0.0, seconds))


@contextlib.contextmanager
def _descriptor(pid: int) -> Iterator[int | None]:
    """Of a process; None if it has been waited for."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        yield None
        return
    try:
        yield pidfd
    finally:
        os.close(pidfd)
