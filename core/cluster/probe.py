"""Measures the links between nodes, over sockets with the join token's keys."""

import asyncio
import statistics
import time

import zmq

from quire.core.cluster.check_messages import Quantity
from quire.core.errors import ConfigError
from quire.core.wire.channel import CurveKeys, bind_router, connect_dealer

LIMIT_SECONDS = 10.0
"""Limit of one measurement. A slower link, or one that a firewall blocks, gives no value."""
_NUM_PINGS, _NUM_UNCOUNTED = 40, 5
_PING = b"ping"
_CHUNK = bytes(256 << 10)
_MAX_IN_FLIGHT = 64  # chunks: what a link of 10 Gb/s with a round trip of 10 ms holds
_RISE_SECONDS, _SEND_SECONDS = 0.2, 0.5


class Probe:
    """This node's end of the measurements: answers those of other nodes, and runs its own. Use from one event loop.

    Args:
        address: this host's, at which a free port is listened on.

    Raises:
        ConfigError: the address is not this host's.
    """

    def __init__(self, address: str, keys: CurveKeys) -> None:
        self._keys = keys
        try:
            self._channel = bind_router(f"tcp://{address}:*", keys, self._answer)
        except zmq.ZMQError as error:
            raise ConfigError(f"{address} cannot be listened on: {error}; QUIRE_HOST_IP names this host's.") from None

    @property
    def endpoint(self) -> str:
        """The endpoint that other nodes measure to."""
        return self._channel.address

    async def measure(self, quantity: Quantity, endpoint: str) -> float | None:
        """The median round trip to another node's probe in seconds, or bytes a second; None if it does not answer."""
        try:
            return await (self._latency(endpoint) if quantity == "latency" else self._bandwidth(endpoint))
        except TimeoutError:
            return None

    def close(self) -> None:
        """Stops listening. Idempotent."""
        self._channel.close()

    async def _latency(self, endpoint: str) -> float:
        line = _Line(endpoint, self._keys)
        try:
            async with asyncio.timeout(LIMIT_SECONDS):
                times = [await line.round_trip() for _ in range(_NUM_UNCOUNTED + _NUM_PINGS)]
        finally:
            line.close()
        return statistics.median(times[_NUM_UNCOUNTED:])

    async def _bandwidth(self, endpoint: str) -> float:
        line = _Line(endpoint, self._keys)
        try:
            async with asyncio.timeout(LIMIT_SECONDS):
                await line.round_trip()
                return await line.rate()
        finally:
            line.close()

    def _answer(self, frames: list[bytes]) -> None:
        identity, payload, *_ = frames
        self._channel.send([identity, payload if len(payload) <= len(_PING) else b""])


class _Line:
    """A connection to another node's probe."""

    def __init__(self, endpoint: str, keys: CurveKeys) -> None:
        self._answers: asyncio.Queue[float] = asyncio.Queue()  # when they came
        self._channel = connect_dealer(endpoint, keys, lambda frames: self._answers.put_nowait(time.perf_counter()))

    async def round_trip(self) -> float:
        start = time.perf_counter()
        self._channel.send([_PING])
        return await self._answers.get() - start

    async def rate(self) -> float:
        """Bytes a second, measured after the number of chunks in flight has ramped up."""
        start = arrived_at = counted_from = time.perf_counter()
        num_in_flight, num_counted, wanted, is_rising = 0, 0, 1, True
        while True:
            while num_in_flight < wanted and time.perf_counter() - start < _SEND_SECONDS:
                self._channel.send([_CHUNK])
                num_in_flight += 1
            if not num_in_flight:
                return num_counted * len(_CHUNK) / (arrived_at - counted_from)
            arrived_at = await self._answers.get()
            num_in_flight, num_counted, wanted = num_in_flight - 1, num_counted + 1, min(wanted + 1, _MAX_IN_FLIGHT)
            if is_rising and num_in_flight and arrived_at - start >= _RISE_SECONDS:
                counted_from, num_counted, is_rising = arrived_at, 0, False

    def close(self) -> None:
        self._channel.close()
