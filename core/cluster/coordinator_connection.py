"""The way from a node to node 0, whose name may be known late, and may come to stand for another address. So may this
host's own."""

import asyncio

from quire.core.cluster.addresses import address_towards, interface_of, look_up, own_addresses
from quire.core.errors import ConfigError
from quire.core.wire.channel import CONNECT_SECONDS, Channel

LOOK_UP_SECONDS = 1.0
"""Between two attempts to find an address."""


class CoordinatorConnection:
    """Connects a channel to node 0. Its user says whether there is a connection.

    Args:
        head: node 0's name or address, and port.
        own: this host's name or address for other nodes; empty: the address from which packets go to node 0.

    Attributes:
        own_address: this host's, for other nodes; empty until it is known.
        own_obstacle: why nothing can be reached at the address that `own` stands for; for people.
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
        """For people: node 0 as it was named, and why nothing can be reached there, if that is known."""
        return self._coordinator if self._obstacle is None else f"{self._coordinator} ({self._obstacle})"

    async def follow(self) -> None:
        """Connects to where the name leads. As long as there is no connection, looks again, and connects to the next
        one of its addresses. Runs until it is cancelled."""
        while True:
            if not self.is_connected:
                self.own_obstacle = await self._find_own()
                if self.own_obstacle is None:
                    self._obstacle = await self._find_head()
            is_hindered = self.own_obstacle or self._obstacle
            await asyncio.sleep(LOOK_UP_SECONDS if is_hindered else CONNECT_SECONDS)

    async def _find_own(self) -> str | None:
        """Returns what is in the way. An interface may come up later than this process, and a name be known later."""
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
        """Connects. Returns what is in the way."""
        name, _, port = self._coordinator.rpartition(":")
        try:
            self._connect([f"{each}:{port}" for each in await look_up(name)])
        except OSError as error:
            return error.strerror
        return None

    def _connect(self, places: list[str]) -> None:
        """Raises OSError if no packets go there."""
        next_number = places.index(self._tried) + 1 if self._tried in places else 0
        place = places[next_number % len(places)]
        if not self._own:
            self.own_address = address_towards(place.rpartition(":")[0])
        if place != self._tried:
            self._channel.connect(f"tcp://{place}")
            self._tried = place
