"""Servers whose engines share experts agree when these start and end, over real sockets."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from quire.core.cluster.join_token import JoinToken
from quire.core.cluster.messages import CoordinatorStart
from quire.core.cluster.node_compatibility import NodeFacts
from quire.core.errors import ConfigError, EngineDeadError, PeerLostError
from quire.frontend.launch.launcher import EngineLauncher
from quire.frontend.launch.peer_servers import CoordinatorServer, ParticipantServer
from quire.frontend.launch.shared_experts import Epochs
from tests.core.engine.null_engine import engine_config
from tests.servers import free_port

KEYS = JoinToken("t" * 32).keys()
SETTINGS = {"--dtype": "bfloat16", "--max-num-batched-tokens": "64"}


def facts(*engines: int, settings: dict[str, str] = SETTINGS) -> NodeFacts:
    address = f"127.0.0.{1 + engines[0]}"
    return NodeFacts("servers", list(engines), 4, address, f"host-{engines[0]}", "1.0", {}, "d", settings)


def run(test: Awaitable[None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await test

    asyncio.run(limited())


@dataclass
class Engine:
    """One that was started, and notes why it is ended."""

    place: str
    ended: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def end(self, reason: PeerLostError) -> None:
        if not self.ended.done():
            self.ended.set_result(str(reason))


async def start(lives: Epochs, number: int) -> Engine:
    """As a launcher does."""
    await lives.wait_for_hosts(number)
    life = lives.epoch_of(number)
    engine = Engine(life.rendezvous.for_local_engine().init_method.split("?")[0])
    life.add(engine)
    return engine


class Servers:
    """The first server, with engines 0 and 1, and others."""

    def __init__(self) -> None:
        self.head = f"127.0.0.1:{free_port()}"
        self.all: list[CoordinatorServer | ParticipantServer] = []

    def first(self) -> CoordinatorServer:
        self.all.append(first := CoordinatorServer(CoordinatorStart(self.head, KEYS, facts(0, 1))))
        return first

    def further(self, *engines: int, settings: dict[str, str] = SETTINGS) -> ParticipantServer:
        self.all.append(further := ParticipantServer(self.head, KEYS, facts(*engines, settings=settings)))
        return further


@asynccontextmanager
async def servers() -> AsyncIterator[Servers]:
    made = Servers()
    try:
        yield made
    finally:
        for each in made.all:
            each.close()
        await asyncio.sleep(0.1)  # they close on the loop


def test_engines_meet_when_all_servers_are_there_and_end_with_any_of_them() -> None:
    async def test() -> None:
        async with servers() as made:
            first, second = made.first(), made.further(2)
            assert first.waits_for == "the server of engine 2, 3"
            assert second.waits_for == "the server of engine 0"
            starts = [asyncio.create_task(start(*each)) for each in ((first, 0), (second, 2), (first, 1))]
            while second.waits_for != "the server of engine 3":
                await asyncio.sleep(0.01)
            assert first.waits_for == "the server of engine 3"
            third = made.further(3)
            engines = await asyncio.gather(*starts, start(third, 3))
            assert len({engine.place for engine in engines}) == 1
            assert (first.waits_for, second.waits_for, third.waits_for) == (None, None, None)

            again = asyncio.create_task(start(second, 2))  # engine 2 has ended
            reasons = [await engine.ended for engine in (engines[0], engines[2], engines[3])]
            assert set(reasons) == {"engine 2, with which this one shares experts, has ended."}
            engines = [await again, await start(first, 0), await start(third, 3), await start(first, 1)]
            assert len({engine.place for engine in engines}) == 1

            EngineLauncher(engine_config(), epochs=third).retire()
            assert "The server with engine 3 (host-3, 127.0.0.4) is lost" in await engines[1].ended
            assert "The server with engine 3 (host-3, 127.0.0.4) is lost" in await engines[0].ended
            assert not engines[2].ended.done()  # its own server gives it up
            while second.waits_for != "the server of engine 3":
                await asyncio.sleep(0.01)
            with pytest.raises(PeerLostError, match="has given up its engines"):
                await third.wait_for_hosts(3)

    run(test())


def test_servers_wait_for_the_first_one_and_join_the_next() -> None:
    async def test() -> None:
        async with servers() as made:
            second, third = made.further(2), made.further(3)
            starts = [asyncio.create_task(start(*each)) for each in ((second, 2), (third, 3))]
            first = made.first()
            engines = [await start(first, 0), await start(first, 1), *await asyncio.gather(*starts)]
            first.retire()
            assert "the server of engine 0 is lost" in await engines[2].ended
            starts = [asyncio.create_task(start(*each)) for each in ((second, 2), (third, 3))]
            while (second.waits_for, third.waits_for) != ("the server of engine 0",) * 2:
                await asyncio.sleep(0.01)
            first = made.first()
            engines = [await start(first, 0), await start(first, 1), *await asyncio.gather(*starts)]
            assert len({engine.place for engine in engines}) == 1

    run(test())


def test_a_server_that_comes_and_goes_leaves_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with servers() as made:
            first = made.first()
            waiting = asyncio.create_task(first.wait_for_hosts(0))
            num_tasks = []
            for _ in range(4):
                second = made.further(2)
                asking = asyncio.create_task(second.wait_for_hosts(2))
                while second.waits_for != "the server of engine 3":
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.1)  # it has asked
                second.close()
                with pytest.raises(PeerLostError, match="has given up its engines"):
                    await asking
                while first.waits_for != "the server of engine 2, 3":
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.01)
                num_tasks.append(len(asyncio.all_tasks()))
            assert len(set(num_tasks)) == 1
            waiting.cancel()

    with caplog.at_level(logging.INFO):
        run(test())
    assert caplog.text.count("waiting at") <= 3  # once, and when it waits for less, and perhaps a reminder


def test_whoever_waits_is_told_when_its_server_closes() -> None:
    async def test() -> None:
        async with servers() as made:
            first, joined = made.first(), made.further(2)
            starts = [asyncio.create_task(each.wait_for_hosts(number)) for each, number in ((first, 0), (joined, 2))]
            while joined.waits_for != "the server of engine 3":
                await asyncio.sleep(0.01)
            joined.close()
            with pytest.raises(PeerLostError, match="has given up its engines"):
                await starts[1]
            first.close()
            with pytest.raises(EngineDeadError, match="its engines have ended"):
                await starts[0]
            lonely = made.further(3)
            start = asyncio.create_task(lonely.wait_for_hosts(3))
            await asyncio.sleep(0)
            lonely.close()
            with pytest.raises(PeerLostError, match="has given up its engines"):
                await start

    run(test())


def test_a_server_that_cannot_open_the_meeting_says_so_on_both_sides(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with servers() as made:
            elsewhere = replace(facts(0, 1), address="192.0.2.1")  # no address of this host
            made.all.append(first := CoordinatorServer(CoordinatorStart(made.head, KEYS, elsewhere)))
            waiting = asyncio.create_task(first.all_joined())
            with pytest.raises(PeerLostError, match="Cannot assign requested address"):
                await made.further(2, 3).wait_for_hosts(2)
            await waiting

    run(test())
    assert "engine 2 cannot be started" in caplog.text


def test_a_server_that_cannot_reach_the_first_one_says_so() -> None:
    async def test() -> None:
        async with servers() as made:
            made.all.append(further := ParticipantServer("127.0.0.1:no-port", KEYS, facts(2)))
            for _ in range(2):
                with pytest.raises(PeerLostError, match="Invalid argument"):
                    await further.wait_for_hosts(2)

    run(test())


def test_a_server_with_other_settings_is_refused_and_both_are_told(caplog: pytest.LogCaptureFixture) -> None:
    reason = "It was started with --dtype float32, and node 0 with --dtype bfloat16; use one value on all."

    async def test() -> None:
        async with servers() as made:
            waiting = asyncio.create_task(made.first().wait_for_hosts(0))
            further = made.further(2, 3, settings=SETTINGS | {"--dtype": "float32"})
            with pytest.raises(ConfigError, match=f"Node 0 refuses this node: {reason}"):
                await further.wait_for_hosts(2)
            assert not waiting.done()
            waiting.cancel()

    run(test())
    assert f"the server with engine 2, 3 (host-2, 127.0.0.3) is refused: {reason}" in caplog.text


def test_an_engine_node_does_not_join_servers() -> None:
    async def test() -> None:
        async with servers() as made:
            waiting = asyncio.create_task(made.first().wait_for_hosts(0))
            made.all.append(further := ParticipantServer(made.head, KEYS, replace(facts(2), division="engines")))
            with pytest.raises(ConfigError, match="started for engines, and node 0 for servers"):
                await further.wait_for_hosts(2)
            waiting.cancel()

    run(test())
