"""Listening sockets, TCP or Unix, which are bound before the model loads."""

import errno
import resource
import socket
import stat
from pathlib import Path

from quire.core.errors import ConfigError
from quire.frontend.http.server_config import ServerConfig

BACKLOG = 2048
MAX_OPEN_FILES = 65536
"""Soft limit of file descriptors that a server sets, up to the hard limit. Each connection takes one."""
RESERVED_FILES = 256
"""Descriptors that are kept for anything but connections."""


def bind(server: ServerConfig) -> socket.socket:
    """A listening socket, bound before the model loads: a port in use is reported at once, and clients may queue.

    Raises:
        ConfigError: the address is taken or not ours.
    """
    _make_room()
    if server.uds is not None:
        return _bind_unix(server.uds)
    return _bind_tcp(server.host or "0.0.0.0", server.port, "--host", "--port")


def bind_admin(server: ServerConfig) -> list[socket.socket]:
    """The listening socket of `--admin-port`, if there is one. Raises ConfigError as `bind` does."""
    if server.admin_port is None:
        return []
    return [_bind_tcp(*server.admin_address, "--admin-port", "--admin-port")]


def _bind_tcp(host: str, port: int, host_flag: str, port_flag: str) -> socket.socket:
    try:
        [(family, kind, protocol, _, address), *_] = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except socket.gaierror as error:
        raise ConfigError(f"{host_flag}: cannot resolve {host!r}: {error.strerror}.") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"Port {port} is in use; choose another with {port_flag}, or 0 for any.") from None
        if error.errno == errno.EACCES:
            raise ConfigError(
                f"Port {port} is only for privileged processes; choose one from 1024 on with {port_flag}."
            ) from None
        raise ConfigError(f"Cannot listen on {host}:{port}: {error.strerror}.") from None
    return listener


def _make_room() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def most_connections() -> int:
    """The number of connections for which this process has file descriptors, a reserve aside."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else soft
    return max(most - RESERVED_FILES, most // 2)


def _bind_unix(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if Path(path).exists() and not _is_stale(path):
            raise ConfigError(f"--uds: {path} exists and is in use; remove it or choose another path.")
        Path(path).unlink(missing_ok=True)
        listener.bind(path)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"--uds: cannot listen on {path}: {error.strerror or error}.") from None
    except ConfigError:
        listener.close()
        raise
    return listener


def _is_stale(path: str) -> bool:
    """True for a socket that a dead server left behind."""
    if not stat.S_ISSOCK(Path(path).stat().st_mode):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(path) == errno.ECONNREFUSED


def url_of(listener: socket.socket, server: ServerConfig) -> str:
    """The server's URL without a path."""
    if server.uds is not None:
        return f"unix:{server.uds}"
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "localhost", "::": "localhost"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{'https' if server.ssl_certfile else 'http'}://{shown}:{port}"


def release(listener: socket.socket, server: ServerConfig) -> None:
    """Closes the socket and removes its file, if it has one."""
    listener.close()
    if server.uds is not None:
        Path(server.uds).unlink(missing_ok=True)
