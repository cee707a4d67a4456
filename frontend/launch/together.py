"""Engines that share experts: they are started together, and none goes on without the others."""

import asyncio
import os
import socket
from typing import Protocol

from quire.core.cluster.addresses import listen
from quire.core.errors import PeerLostError
from quire.core.wire.meeting import Meeting, endpoint_of, listening_at


class StartedEngine(Protocol):
    """A running engine that can be ended."""

    def end(self, reason: PeerLostError) -> None:
        """Ends it at once. Harmless when it has ended."""


class EngineHosts(Protocol):
    """The other hosts whose engines share experts with those of this one.

    Attributes:
        address: of this host, for the others.
        has_engines_here: whether this host runs some, too.
    """

    address: str
    has_engines_here: bool

    @property
    def waits_for(self) -> str | None:
        """Which hosts are not there, for people; None if all are."""

    async def all_joined(self) -> None:
        """Returns when all are there."""


class MeetingFile:
    """A file without a name, at which the workers of all engines on one host meet once."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("quire-meeting")

    def here(self) -> Meeting:
        """What an engine on this host is told."""
        return Meeting(f"file:///proc/self/fd/{self._fd}", [self._fd])

    def close(self) -> None:
        """Frees the place."""
        os.close(self._fd)


class MeetingPort:
    """A port of one host, at which the workers of all engines meet once. The host's first engine listens there.

    Args:
        address: of this host.
        is_here: this host has the port. Otherwise it is on the host whose engine is started first.
    """

    def __init__(self, address: str, *, is_here: bool) -> None:
        self._address = address
        # The engine is given the socket itself, so that nobody else takes its port meanwhile.
        self._listener: socket.socket | None = listen(address) if is_here else None
        self._is_taken = False
        self._opened: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        if self._listener is not None:
            self._opened.set_result(endpoint_of(self._listener))

    def here(self) -> Meeting:
        """What an engine on this host is told."""
        assert self._listener is not None  # this host has engines
        if self._is_taken:
            return Meeting(self._opened.result(), address=self._address)
        self._is_taken = True
        return listening_at(self._listener, self._address)

    async def elsewhere(self) -> str | None:
        """What an engine on another host is told: see `RankGroups.join`. None: its host shall open the port, and
        `opened` is told where.

        Raises:
            PeerLostError: the engine has ended whose host was to open it.
        """
        if self._listener is not None or self._is_taken:
            return await asyncio.shield(self._opened)
        self._is_taken = True
        return None

    def opened(self, init_method: str) -> None:
        """An engine's host has opened the port."""
        if not self._opened.done():
            self._opened.set_result(init_method)

    def close(self) -> None:
        """Frees the port. Engines that wait to be told of it are told that it will not come."""
        if self._listener is not None:
            self._listener.close()
        if not self._opened.done():
            self._opened.set_exception(PeerLostError("the engine at which the others were to meet has ended."))
            self._opened.exception()  # perhaps nobody waits for it


class MeetingElsewhere:
    """A port of another host, as its server has told it.

    Args:
        address: of this host.
    """

    def __init__(self, init_method: str, address: str) -> None:
        self._meeting = Meeting(init_method, address=address)

    def here(self) -> Meeting:
        """What an engine on this host is told."""
        return self._meeting

    def close(self) -> None:
        """The other host frees the port."""


class CommonLife:
    """One engine of each number, from their starts to their end; on a host, the part of it that is there.

    Attributes:
        place: where their workers meet.
        numbers: those that have been, or are about to be, started.
    """

    def __init__(self, place: MeetingFile | MeetingPort | MeetingElsewhere) -> None:
        self.place = place
        self.numbers: set[int] = set()
        self._engines: list[StartedEngine] = []
        self._reason: PeerLostError | None = None

    @property
    def port(self) -> MeetingPort:
        """The place, where engines are on several hosts."""
        assert isinstance(self.place, MeetingPort)
        return self.place

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


class CommonLives(Protocol):
    """Gives engines that are started the life that they have in common."""

    @property
    def has_other_hosts(self) -> bool:
        """Whether engines have to wait for `gathered`."""

    @property
    def waits_for(self) -> str | None:
        """See `Launcher.waits_for`."""

    async def gathered(self, number: int) -> None:
        """Engine `number` is about to start; returns when the hosts of all engines are there."""

    def life_of(self, number: int) -> CommonLife:
        """The life of engine `number`, which starts now."""

    def retire(self) -> None:
        """No engine is started here any more: see `Launcher.retire`. Idempotent."""

    def close(self) -> None:
        """Frees the meeting place. Idempotent."""


class EnginesTogether:
    """See `CommonLives`. Gives engines that are started the life that they have in common.

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
        """See `CommonLives.has_other_hosts`."""
        return self._hosts is not None

    @property
    def waits_for(self) -> str | None:
        """See `Launcher.waits_for`."""
        return None if self._hosts is None else self._hosts.waits_for

    async def gathered(self, number: int) -> None:
        """See `CommonLives.gathered`."""
        if self._hosts is None:
            return
        if self._hosts.waits_for is not None:
            self._end(number)  # those that have been started since would meet nobody
        await self._hosts.all_joined()

    def life_of(self, number: int) -> CommonLife:
        """See `CommonLives.life_of`."""
        if self._life is not None and number in self._life.numbers:
            self._end(number)
        if self._life is None:
            self._life = CommonLife(self._new_place())
        self._life.numbers.add(number)
        return self._life

    def end(self, reason: PeerLostError) -> None:
        """Ends all engines that have been started; none can go on."""
        life, self._life = self._life, None
        if life is not None:
            life.end(reason)

    def retire(self) -> None:
        """The server gives up all its engines, and so there is nothing to do."""

    def close(self) -> None:
        """See `CommonLives.close`."""
        life, self._life = self._life, None
        if life is not None:
            life.place.close()

    def _new_place(self) -> MeetingFile | MeetingPort:
        if self._hosts is None:
            return MeetingFile()
        return MeetingPort(self._hosts.address, is_here=self._hosts.has_engines_here)

    def _end(self, number: int) -> None:
        self.end(PeerLostError(f"engine {number}, with which this one shares experts, has ended."))
