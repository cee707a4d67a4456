"""The connection from a node to node 0. Node 0's name may resolve late, or to a new address later; so may this host's
own."""

import asyncio

from quire.core.cluster.addresses import address_towards, interface_of, look_up, own_addresses
from quire.core.errors import ConfigError
from quire.core.wire.channel import CONNECT_SECONDS, Channel

LOOK_UP_SECONDS = 1.0
"""Between two attempts to find an address."""


class CoordinatorConnection:
    """Connects a channel to node 0. Its user reports whether there is a connection.

    Args:
        head: node 0's name or address, and port.
        own: this host's name or address for other nodes; empty: the address from which packets go to node 0.

    Attributes:
        own_address: this host's, for other nodes; empty until it is known.
        own_obstacle: why the address in `own` cannot be used; for people.
        is_connected: whether there is a connection. While there is, node 0 is not looked for.
    """

    def __init__(self, head: str, channel: Channel, own: str) -> None:
        self.own_address = ""
        self.own_obstacle: str | None = None
        self.is_connected = False
        self._coordinator = head
        self._channel = channel
        self._own = own
        self._tried: str | None = None  # the place to which the channel connects
        self._obstacle: str | None = "it is being looked up"

    def __str__(self) -> str:
        """Node 0 as the user named it, and the obstacle if one is known."""
        return self._coordinator if self._obstacle is None else f"{self._coordinator} ({self._obstacle})"

    async def follow(self) -> None:
        """Resolves node 0's name and connects. While there is no connection, resolves again, and tries the next of its
        addresses. Runs until it is cancelled."""
        while True:
            if not self.is_connected:
                self.own_obstacle = await self._find_own()
                if self.own_obstacle is None:
                    self._obstacle = await self._find_head()
            is_hindered = self.own_obstacle or self._obstacle
            await asyncio.sleep(LOOK_UP_SECONDS if is_hindered else CONNECT_SECONDS)

    async def _find_own(self) -> str | None:
        """Resolves this host's own address. Returns the obstacle, if any: its interface may come up after this process
        starts, and its name may resolve later."""
        if not self._own:
            return None
        try:
            [address, *_] = await look_up(self._own)
            interface_of(address)
        except OSError as error:
            return f"QUIRE_HOST_IP is {self._own}, of which no address is known yet ({error.strerror})"
        except ConfigError:
            has = own_addresses()
            return f"QUIRE_HOST_IP is {self._own}, and no interface of this host has that address yet: it has {has}"
        self.own_address = address
        return None

    async def _find_head(self) -> str | None:
        """Connects to node 0. Returns the obstacle, if any."""
        name, _, port = self._coordinator.rpartition(":")
        try:
            self._connect([f"{each}:{port}" for each in await look_up(name)])
        except OSError as error:
            return error.strerror
        return None

    def _connect(self, places: list[str]) -> None:
        """Connects to the next of `places`. Raises OSError if there is no route."""
        next_number = places.index(self._tried) + 1 if self._tried in places else 0
        place = places[next_number % len(places)]
        if not self._own:
            self.own_address = address_towards(place.rpartition(":")[0])
        if place != self._tried:
            self._channel.connect(f"tcp://{place}")
            self._tried = place
