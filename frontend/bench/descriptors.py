"""Room for many connections: each takes a file descriptor in the client and another in the server."""

import resource

from quire.core.errors import ConfigError

RESERVE = 256
"""For everything that is not a connection of the load: libraries, sockets between processes, shared memory, logs."""


def make_room(num_connections: int, option: str) -> None:
    """Raises this process's limit of open files, and that of processes it starts from now on, as far as is needed.

    Raises:
        ConfigError: the system does not allow so many; `option` is what to lower.
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
