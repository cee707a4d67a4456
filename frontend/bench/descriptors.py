"""Raises the limit of open files: a connection takes a file descriptor in the client and another in the server."""

import resource

from quire.core.errors import ConfigError

RESERVE = 256
"""File descriptors besides the connections: libraries, sockets between processes, shared memory, logs."""


def make_room(num_connections: int, option: str) -> None:
    """Raises the limit of open files for this process and its future children, if `num_connections` need it.

    Raises:
        ConfigError: the system allows fewer open files; the message names `option`, which is to be lowered.
    """
    needed = num_connections + RESERVE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"{num_connections:,} connections need about {needed:,} open files, and this system allows {hard:,} "
            f"(`ulimit -Hn`): raise that limit, or lower {option}."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
