"""Addresses of this host and of other nodes. Sockets between nodes are bound to one address, never to all."""

import asyncio
import contextlib
import socket
import threading

import psutil

from quire.core import envs
from quire.core.errors import ConfigError

_ANY = "0.0.0.0"


def resolve(host: str, source: str) -> str:
    """The IPv4 address of a host name; an address is returned as it is. May take as long as the name server.

    Args:
        source: the option that has it, for the message.

    Raises:
        ConfigError: there is no such host, or the address stands for all interfaces.
    """
    check_host(host, source)
    try:
        [address, *_] = _addresses_of(host)
    except OSError:
        raise ConfigError(f"{source} {host!r} has no IPv4 address; name a host that all nodes reach.") from None
    check_host(address, source)
    return address


def check_host(host: str, source: str) -> None:
    """Refuses a text that can never be another host's name or address, without a look-up. Raises as `resolve` does."""
    if host == _ANY:
        raise ConfigError(f"{source} {host} stands for all interfaces; name one address that all nodes reach.")
    if not _can_be_host(host):
        raise ConfigError(f"{source} {host!r} is neither a name nor an IPv4 address; name a host that all nodes reach.")


def _can_be_host(host: str) -> bool:
    if not host.strip("0123456789."):  # a name has a letter in its last part
        try:
            socket.inet_aton(host)
        except OSError:
            return False
    try:
        return ":" not in host and bool(host.encode("idna"))
    except UnicodeError:
        return False


async def look_up(host: str) -> list[str]:
    """The current IPv4 addresses of a host name; an address is returned as it is.

    A name server may take many seconds. The look-up blocks neither the event loop nor the end of this process.

    Raises:
        OSError: it has none, or no name server says so.
    """
    loop = asyncio.get_running_loop()
    found: asyncio.Future[list[str]] = loop.create_future()

    def give(addresses: list[str], error: OSError | None) -> None:
        if found.done():  # the waiter is gone
            return
        if error is None:
            found.set_result(addresses)
        else:
            found.set_exception(error)

    def ask() -> None:
        addresses, failure = [], None
        try:
            addresses = _addresses_of(host)
        except OSError as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(give, addresses, failure)

    threading.Thread(target=ask, name="look-up", daemon=True).start()
    return await found


def _addresses_of(host: str) -> list[str]:
    return [str(place[0]) for *_, place in socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)]


def named_host() -> str:
    """This host's name or address for other nodes from QUIRE_HOST_IP; else empty. The interface need not be up yet.

    Raises:
        ConfigError: it can never be a host's.
    """
    named = envs.read("HOST_IP") or ""
    if named:
        check_host(named, "QUIRE_HOST_IP")
    return named


def address_towards(other: str) -> str:
    """This host's address for packets to another host.

    Raises:
        OSError: there is no way to it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))  # sends nothing
        return probe.getsockname()[0]


def interface_of(address: str) -> str:
    """The name of the network interface that has `address`.

    Raises:
        ConfigError: no interface has it.
    """
    wanted = "127.0.0.1" if address.startswith("127.") else address  # a loopback has all of 127.0.0.0/8
    interfaces = {name: {each.address for each in found} for name, found in psutil.net_if_addrs().items()}
    for name, addresses in interfaces.items():
        if wanted in addresses:
            return name
    raise ConfigError(f"No interface of this host has the address {address}; it has {own_addresses()}.")


def own_addresses() -> str:
    """This host's IPv4 addresses, for people."""
    found = (
        each.address for all_of in psutil.net_if_addrs().values() for each in all_of if each.family == socket.AF_INET
    )
    return ", ".join(sorted(found)) or "none"


def listen(address: str) -> socket.socket:
    """A listening TCP socket on a free port of `address`."""
    return socket.create_server((address, 0))
