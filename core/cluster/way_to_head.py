"""The way from a node to node 0, whose name may be known late, and may come to stand for another address."""

import asyncio

from quire.core.cluster.addresses import address_towards, look_up
from quire.core.wire.channel import CONNECT_SECONDS, Channel

LOOK_UP_SECONDS = 1.0
"""Between two attempts to find an address."""


class WayToHead:
    """Connects a channel to node 0. Its user says whether there is a connection.

    Args:
        head: node 0's name or address, and port.
        own_address: this host's, for other nodes; empty: that from which packets go to node 0.

    Attributes:
        own_address: as given, or as found.
        is_connected: whether there is a connection. While there is, node 0 is not looked for.
    """

    def __init__(self, head: str, channel: Channel, own_address: str) -> None:
        self.own_address = own_address
        self.is_connected = False
        self._head = head
        self._channel = channel
        self._is_named = bool(own_address)
        self._tried: str | None = None  # the place to which the channel connects
        self._obstacle: str | None = "it is being looked up"

    def __str__(self) -> str:
        """For people: node 0 as it was named, and why nothing can be reached there, if that is known."""
        return self._head if self._obstacle is None else f"{self._head} ({self._obstacle})"

    async def follow(self) -> None:
        """Connects to where the name leads. As long as there is no connection, looks again, and connects to the next
        one of its addresses. Runs until it is cancelled."""
        name, _, port = self._head.rpartition(":")
        while True:
            if not self.is_connected:
                try:
                    self._connect([f"{each}:{port}" for each in await look_up(name)])
                    self._obstacle = None
                except OSError as error:
                    self._obstacle = error.strerror
            await asyncio.sleep(LOOK_UP_SECONDS if self._obstacle else CONNECT_SECONDS)

    def _connect(self, places: list[str]) -> None:
        """Raises OSError if no packets go there."""
        next_number = places.index(self._tried) + 1 if self._tried in places else 0
        place = places[next_number % len(places)]
        if not self._is_named:
            self.own_address = address_towards(place.rpartition(":")[0])
        if place != self._tried:
            self._channel.connect(f"tcp://{place}")
            self._tried = place
