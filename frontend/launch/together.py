"""Engines that share experts: they are started together, and none goes on without the others."""

import os
import socket
from typing import Protocol

from quire.core.cluster.addresses import listen
from quire.core.cluster.facts import name_ranks
from quire.core.errors import PeerLostError
from quire.core.wire.meeting import Meeting


class StartedEngine(Protocol):
    """A running engine that can be ended."""

    def end(self, reason: PeerLostError) -> None:
        """Ends it at once. Harmless when it has ended."""


class EngineHosts(Protocol):
    """The other hosts whose engines share experts with those of this one.

    Attributes:
        address: of this host, for the others.
    """

    address: str

    @property
    def missing(self) -> list[int]:
        """The numbers of engines whose hosts are not there."""

    async def all_joined(self) -> None:
        """Returns when all are there."""


class MeetingPlace(Protocol):
    """Where the workers of all engines meet once."""

    def here(self) -> Meeting:
        """What an engine on this host is told."""

    def elsewhere(self) -> str:
        """What an engine on another host is told: see `RankGroups.join`."""

    def close(self) -> None:
        """Frees the place."""


class _File:
    """A file without a name, for engines of one host."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("quire-meeting")

    def here(self) -> Meeting:
        return Meeting(self.elsewhere(), [self._fd])

    def elsewhere(self) -> str:
        return f"file:///proc/self/fd/{self._fd}"

    def close(self) -> None:
        os.close(self._fd)


class _Socket:
    """A port of this host, at which the first of its engines listens."""

    def __init__(self, address: str) -> None:
        self._address = address
        # The engine is given the socket itself, so that nobody else takes its port meanwhile.
        self._listener: socket.socket = listen(address)
        self._is_taken = False

    def here(self) -> Meeting:
        if self._is_taken:
            return Meeting(self.elsewhere(), address=self._address)
        self._is_taken = True
        fd = self._listener.fileno()
        return Meeting(f"{self.elsewhere()}?listen_fd={fd}", [fd], self._address)

    def elsewhere(self) -> str:
        return f"tcp://{self._address}:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        self._listener.close()


class CommonLife:
    """One engine of each number, from their starts to their end.

    Attributes:
        place: where their workers meet.
        numbers: those that have been, or are about to be, started.
    """

    def __init__(self, place: MeetingPlace) -> None:
        self.place = place
        self.numbers: set[int] = set()
        self._engines: list[StartedEngine] = []
        self._reason: PeerLostError | None = None

    def add(self, engine: StartedEngine) -> None:
        """An engine has been started; perhaps too late."""
        self._engines.append(engine)
        if self._reason is not None:
            engine.end(self._reason)

    def end(self, reason: PeerLostError) -> None:
        """Ends all engines."""
        self._reason = reason
        for engine in self._engines:
            engine.end(reason)
        self.place.close()


class EnginesTogether:
    """Gives engines that are started the life that they have in common.

    An engine that is started again lacks peers: those of its former self cannot go on. So the others are ended, each
    one's supervisor starts it again, and all meet at another place.

    Args:
        hosts: of engines on other hosts; None: all are on this one.
    """

    def __init__(self, hosts: EngineHosts | None = None) -> None:
        self._hosts = hosts
        self._life: CommonLife | None = None

    @property
    def has_other_hosts(self) -> bool:
        """Whether engines have to wait for `gathered`."""
        return self._hosts is not None

    @property
    def waits_for(self) -> str | None:
        """See `Launcher.waits_for`."""
        missing = [] if self._hosts is None else self._hosts.missing
        return f"the host of engine {name_ranks(missing)}" if missing else None

    async def gathered(self, number: int) -> None:
        """Engine `number` is about to start; returns when the hosts of all engines are there."""
        if self._hosts is None:
            return
        if self._hosts.missing:
            self._end(number)  # those that have been started since would meet nobody
        await self._hosts.all_joined()

    def life_of(self, number: int) -> CommonLife:
        """The life of engine `number`, which starts now."""
        if self._life is not None and number in self._life.numbers:
            self._end(number)
        if self._life is None:
            self._life = CommonLife(_File() if self._hosts is None else _Socket(self._hosts.address))
        self._life.numbers.add(number)
        return self._life

    def close(self) -> None:
        """Frees the meeting place. Idempotent."""
        life, self._life = self._life, None
        if life is not None:
            life.place.close()

    def _end(self, number: int) -> None:
        life, self._life = self._life, None
        if life is not None:
            life.end(PeerLostError(f"engine {number}, with which this one shares experts, has ended."))
