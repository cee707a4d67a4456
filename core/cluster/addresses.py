"""Addresses of this host and of other nodes. Sockets between nodes are bound to one address, never to all."""

import socket

import psutil

from quire.core import envs
from quire.core.errors import ConfigError


def resolve(host: str, source: str) -> str:
    """The IPv4 address of a host name; an address stays as it is.

    Args:
        source: the option that has it, for the message.

    Raises:
        ConfigError: there is no such host, or the address stands for all interfaces.
    """
    try:
        address = socket.gethostbyname(host)  # of IPv4
    except (OSError, UnicodeError):
        raise ConfigError(f"{source} {host!r} has no IPv4 address; name a host that all nodes reach.") from None
    if address == "0.0.0.0":
        raise ConfigError(f"{source} {host} stands for all interfaces; name one address that all nodes reach.")
    return address


def own_address(towards: str) -> str:
    """This host's address for other nodes: QUIRE_HOST_IP, else the one from which packets go to `towards`."""
    named = envs.read("HOST_IP")
    if named:
        return resolve(named, "QUIRE_HOST_IP")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, 9))  # sends nothing
        except OSError as error:
            raise ConfigError(
                f"There is no route to {towards} ({error.strerror}); see --master-addr, or name this host's own "
                "address in QUIRE_HOST_IP."
            ) from None
        return probe.getsockname()[0]


def interface_of(address: str) -> str:
    """The name of the network interface that has `address`.

    Raises:
        ConfigError: no interface has it.
    """
    interfaces = psutil.net_if_addrs()
    wanted = "127.0.0.1" if address.startswith("127.") else address  # a loopback has all of 127.0.0.0/8
    for name, addresses in interfaces.items():
        if any(each.address == wanted for each in addresses):
            return name
    own = sorted(each.address for all_of in interfaces.values() for each in all_of if each.family == socket.AF_INET)
    raise ConfigError(
        f"This host has no address {address}, but {', '.join(own)}; --master-addr names node 0's address, and "
        "QUIRE_HOST_IP this host's."
    )


def listen(address: str) -> socket.socket:
    """A listening TCP socket on a free port of `address`."""
    return socket.create_server((address, 0))
