"""The ends of processes that were killed together: an engine and its workers, which are in one group."""

import asyncio
import contextlib
import os
import select
from collections.abc import Iterator
from pathlib import Path


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
        with contextlib.suppress(OSError):
            name, state = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(") ")[::2]
            if state[0] not in "ZX":
                found.append(f"{pid} ({name})")
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
