"""Engines that share experts: they start together, in an epoch, and end together."""

import asyncio
import os
import socket
from typing import Protocol

from quire.core.cluster.addresses import listen
from quire.core.cluster.engine_hosts import EngineHosts
from quire.core.errors import PeerLostError
from quire.core.wire.rendezvous import Rendezvous, endpoint_of, listening_rendezvous


class StartedEngine(Protocol):
    """A running engine that can be ended."""

    def end(self, reason: PeerLostError) -> None:
        """Ends the engine at once. Does nothing when it has ended."""


class RendezvousFile:
    """A file without a name, at which the workers of all engines on one host meet once."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("quire-rendezvous")

    def for_local_engine(self) -> Rendezvous:
        """The rendezvous for an engine on this host."""
        return Rendezvous(f"file:///proc/self/fd/{self._fd}", [self._fd])

    def close(self) -> None:
        """Frees the file."""
        os.close(self._fd)


class RendezvousPort:
    """A port of one host, at which the workers of all engines meet once. The host's first engine listens there.

    Args:
        address: of this host.
        is_here: this host has the port. Otherwise it is on the host whose engine is started first.
    """

    def __init__(self, address: str, *, is_here: bool) -> None:
        self._address = address
        # The engine inherits the socket itself, so that no other process takes its port meanwhile.
        self._listener: socket.socket | None = listen(address) if is_here else None
        self._is_taken = False
        self._opened: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        if self._listener is not None:
            self._opened.set_result(endpoint_of(self._listener))

    def for_local_engine(self) -> Rendezvous:
        """The rendezvous for an engine on this host."""
        assert self._listener is not None  # this host has engines
        if self._is_taken:
            return Rendezvous(self._opened.result(), address=self._address)
        self._is_taken = True
        return listening_rendezvous(self._listener, self._address)

    async def for_remote_engine(self) -> str | None:
        """The address for an engine on another host, for `RankGroups.join`. None: the engine's host opens the port, and
        `on_opened` gets the address.

        Raises:
            PeerLostError: the engine has ended whose host was to open it.
        """
        if self._listener is not None or self._is_taken:
            return await asyncio.shield(self._opened)
        self._is_taken = True
        return None

    def on_opened(self, init_method: str) -> None:
        """Takes the address at which an engine's host has opened the port."""
        if not self._opened.done():
            self._opened.set_result(init_method)

    def close(self) -> None:
        """Frees the port. Fails the engines that still wait for its address."""
        if self._listener is not None:
            self._listener.close()
        if not self._opened.done():
            self._opened.set_exception(PeerLostError("the engine at which the others were to meet has ended."))
            self._opened.exception()  # perhaps nobody waits for it


class RemoteRendezvous:
    """A port of another host, as its server has announced it.

    Args:
        address: of this host.
    """

    def __init__(self, init_method: str, address: str) -> None:
        self._rendezvous = Rendezvous(init_method, address=address)

    def for_local_engine(self) -> Rendezvous:
        """The rendezvous for an engine on this host."""
        return self._rendezvous

    def close(self) -> None:
        """Does nothing: the other host frees the port."""


class Epoch:
    """One engine of each number, from their common start to their end. Each host has its part of the epoch.

    Attributes:
        rendezvous: where their workers meet.
        numbers: of the engines that have been, or are about to be, started.
    """

    def __init__(self, rendezvous: RendezvousFile | RendezvousPort | RemoteRendezvous) -> None:
        self.rendezvous = rendezvous
        self.numbers: set[int] = set()
        self._engines: list[StartedEngine] = []
        self._reason: PeerLostError | None = None

    @property
    def port(self) -> RendezvousPort:
        """The rendezvous, if engines are on several hosts."""
        assert isinstance(self.rendezvous, RendezvousPort)
        return self.rendezvous

    def add(self, engine: StartedEngine) -> None:
        """Adds an engine that was started. Ends it if the epoch is over."""
        self._engines.append(engine)
        if self._reason is not None:
            engine.end(self._reason)

    def end(self, reason: PeerLostError) -> None:
        """Ends all engines of the epoch."""
        self._reason = reason
        for engine in self._engines:
            engine.end(reason)
        self.rendezvous.close()


class Epochs(Protocol):
    """Assigns engines that start to epochs."""

    @property
    def has_other_hosts(self) -> bool:
        """True if engines have to wait for `wait_for_hosts`."""

    @property
    def waits_for(self) -> str | None: ...

    async def wait_for_hosts(self, number: int) -> None:
        """Waits until the hosts of all engines have joined. Engine `number` is about to start."""

    def epoch_of(self, number: int) -> Epoch:
        """The epoch of engine `number`, which starts now."""

    def retire(self) -> None:
        """Notes that no engine is started here any more, as `Launcher.retire` does. Idempotent."""

    def close(self) -> None:
        """Frees the rendezvous. Idempotent."""


class EpochCoordinator:
    """Assigns engines that start to epochs.

    A restarted engine has no peers, because the peers of its former process cannot go on. So the others are ended,
    their supervisors restart them, and all meet at a new rendezvous.

    Args:
        hosts: of engines on other hosts; None: all are on this one.
    """

    def __init__(self, hosts: EngineHosts | None = None) -> None:
        self._hosts = hosts
        self._epoch: Epoch | None = None

    @property
    def has_other_hosts(self) -> bool:
        return self._hosts is not None

    @property
    def waits_for(self) -> str | None:
        return None if self._hosts is None else self._hosts.waits_for

    async def wait_for_hosts(self, number: int) -> None:
        if self._hosts is None:
            return
        if self._hosts.waits_for is not None:
            self._end(number)  # engines started since would wait for peers in vain
        await self._hosts.all_joined()

    def epoch_of(self, number: int) -> Epoch:
        if self._epoch is not None and number in self._epoch.numbers:
            self._end(number)
        if self._epoch is None:
            self._epoch = Epoch(self._new_place())
        self._epoch.numbers.add(number)
        return self._epoch

    def end(self, reason: PeerLostError) -> None:
        """Ends all engines that were started; none can go on."""
        epoch, self._epoch = self._epoch, None
        if epoch is not None:
            epoch.end(reason)

    def retire(self) -> None:
        """Does nothing: the server gives up all its engines."""

    def close(self) -> None:
        epoch, self._epoch = self._epoch, None
        if epoch is not None:
            epoch.rendezvous.close()

    def _new_place(self) -> RendezvousFile | RendezvousPort:
        if self._hosts is None:
            return RendezvousFile()
        return RendezvousPort(self._hosts.address, is_here=self._hosts.has_engines_here)

    def _end(self, number: int) -> None:
        self.end(PeerLostError(f"engine {number}, with which this one shares experts, has ended."))
