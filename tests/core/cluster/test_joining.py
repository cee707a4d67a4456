"""Nodes join, are refused and are lost, over real sockets."""

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest
from msgspec.structs import replace

from quire.core.cluster import heartbeat
from quire.core.cluster.coordinator import ClusterCoordinator
from quire.core.cluster.join_token import JoinToken
from quire.core.cluster.messages import (
    CONTROL,
    CoordinatorStart,
    Join,
    Joined,
    JoinRefused,
    ShareFile,
    StartWorkers,
    ToNode,
    control,
)
from quire.core.cluster.node_compatibility import NodeFacts, digest_of_sources
from quire.core.cluster.participant import JOIN_SECONDS, Participant
from quire.core.errors import ConfigError, EngineError, HostLostError
from quire.core.wire.channel import CurveKeys, connect_dealer
from tests.servers import free_port

KEYS = JoinToken("t" * 32).keys()
HEAD = NodeFacts("workers", [0], 2, "127.0.0.1", "here", "1.0", {"torch": "2.13", "xgrammar": "0.2"}, "d1")
NODE = NodeFacts("workers", [1], 2, "127.0.0.2", "there", "1.0", {"torch": "2.13", "xgrammar": "0.2"}, "d1")


def run(test: Awaitable[None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await test

    asyncio.run(limited())


class Heard:
    """Both kinds of listener: notes what it hears."""

    def __init__(self) -> None:
        self.inputs: asyncio.Queue[bytes] = asyncio.Queue()
        self.outputs: asyncio.Queue[bytes] = asyncio.Queue()
        self.orders: asyncio.Queue[StartWorkers | ShareFile] = asyncio.Queue()
        self.lost: asyncio.Queue[EngineError] = asyncio.Queue()
        self.on_input = self.inputs.put_nowait
        self.on_output = self.outputs.put_nowait
        self.on_order = self.orders.put_nowait
        self.on_lost = self.lost.put_nowait


@contextlib.asynccontextmanager
async def head(facts: NodeFacts = HEAD) -> AsyncIterator[tuple[ClusterCoordinator, str]]:
    address = f"127.0.0.1:{free_port()}"
    cluster = ClusterCoordinator(CoordinatorStart(address, KEYS, facts))
    try:
        yield cluster, address
    finally:
        cluster.close("the test is over.")


@contextlib.asynccontextmanager
async def member(
    address: str, facts: NodeFacts = NODE, keys: CurveKeys = KEYS
) -> AsyncIterator[tuple[Participant, Heard, "asyncio.Task[str]"]]:
    heard = Heard()
    participant = Participant(address, keys, facts, heard)
    running = asyncio.create_task(participant.run())
    try:
        yield participant, heard, running
    finally:
        running.cancel()
        await asyncio.wait([running])
        participant.close()


def test_bytes_and_files_go_both_ways_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.core.cluster.participant.JOIN_SECONDS", 600.0)  # a node that is there tries sooner

    async def test() -> None:
        async with (
            head() as (cluster, address),
            member(address.replace("127.0.0.1", "localhost")) as (participant, there, running),
        ):
            [node] = await cluster.all_joined()
            node.listener = here = Heard()
            node.tell(ShareFile("/a", b"file"))
            for each in (b"1", b"2"):
                node.send_to_workers(each)
            assert await there.orders.get() == ShareFile("/a", b"file")
            assert [await there.inputs.get(), await there.inputs.get()] == [b"1", b"2"]
            participant.send_output(b"3")
            assert await here.outputs.get() == b"3"
            participant.leave("it was told to stop.", "host")
            error = await here.lost.get()
            assert isinstance(error, HostLostError)
            assert "Node 1 (there, 127.0.0.2) is lost: it was told to stop." in str(error)
            assert await running == "it was told to stop."
            assert cluster.missing == [1]

    run(test())


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (replace(NODE, num_ranks=3), "--nnodes 3, and node 0 with 2"),
        (replace(NODE, ranks=[]), "--node-rank gives it number none"),
        (replace(NODE, ranks=[1, 1]), "--node-rank gives it number 1, 1"),
        (replace(NODE, ranks=[2]), "--node-rank gives it number 2, which node 0 has or nobody can have"),
        (replace(NODE, quire="1.1"), "It runs Quire 1.1, and node 0 Quire 1.0"),
        (replace(NODE, packages=HEAD.packages | {"torch": "2.12"}), "It runs torch 2.12, and node 0 torch 2.13"),
        (replace(NODE, packages={"torch": "2.13"}), "It runs no xgrammar, and node 0 xgrammar 0.2"),
        (replace(NODE, digest="d2"), "other settings or weights"),
    ],
)
def test_a_node_that_does_not_fit_is_told_why(facts: NodeFacts, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with head() as (cluster, address), member(address, facts) as (_, _, running):
            with pytest.raises(ConfigError, match=f"Node 0 refuses this node: .*{reason}"):
                await running
            assert cluster.missing == [1]

    run(test())
    assert reason in caplog.text  # node 0 says it, too


OLD_JOIN = ["join", ["workers", [1], 2, "127.0.0.2", "there", "0.0.1", "2.13", "d1"], 0.0]


@pytest.mark.parametrize(
    "frames",
    [[CONTROL, msgspec.msgpack.encode(OLD_JOIN)], [CONTROL], [CONTROL, b"", b""], [CONTROL, b"\xc1"], [b"what"]],
    ids=["another-version", "one-frame", "three-frames", "no-messagepack", "another-kind"],
)
def test_whoever_says_what_cannot_be_read_is_told_so(frames: list[bytes], caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        answers: asyncio.Queue[list[bytes]] = asyncio.Queue()
        async with head() as (cluster, address):
            stranger = connect_dealer(f"tcp://{address}", KEYS, answers.put_nowait)
            for _ in range(3):
                stranger.send(frames)
                kind, payload = await answers.get()
                tag, reason = msgspec.msgpack.decode(payload)  # other versions read it, too
                assert (kind, tag) == (CONTROL, "refused")
                assert "cannot read" in reason
                assert "install one version on all nodes" in reason
            stranger.close()
            async with member(address) as (participant, _, running):
                [node] = await cluster.all_joined()
                node.listener = here = Heard()
                participant._channel.send(frames)
                assert "cannot read" in str(await here.lost.get())
                await running

    run(test())
    assert (
        caplog.text.count("a node at 127.0.0.1 is refused: It says what node 0 cannot read") == 1
    )  # and not each time
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("package", ["core", "executor", "frontend", "ops"])
def test_a_node_is_told_of_another_version_by_a_digest_of_its_files(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [str(tmp_path / "a")]
    found, empty = (SimpleNamespace(submodule_search_locations=each) for each in (places, []))
    monkeypatch.setattr(
        "quire.core.cluster.node_compatibility.find_spec", lambda name: found if name == f"quire.{package}" else empty
    )
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "kernel.cpp").write_text("int x;")
    (tmp_path / "a" / "__init__.py").touch()
    first = digest_of_sources()
    (tmp_path / "a").rename(tmp_path / "c")
    places[0] = str(tmp_path / "c")
    (tmp_path / "c" / "__init__.pyc").write_text("bytecode")
    (tmp_path / "c" / ".#__init__.py").symlink_to("user@host.1234")  # an editor's lock
    assert digest_of_sources() == first
    assert NodeFacts.of_this_host("workers", [0], 2, "", None).quire.endswith("+" + first[:12])
    (tmp_path / "c" / "b" / "kernel.cpp").write_text("int y;")
    assert digest_of_sources() != first
    (tmp_path / "c" / "gone.py").symlink_to("nowhere")
    with pytest.raises(ConfigError, match=r"gone.py of Quire cannot be read: No such file.*install"):
        digest_of_sources()


def test_a_node_of_another_engine_is_refused_and_not_waited_for() -> None:
    async def test() -> None:
        address, facts = f"127.0.0.1:{free_port()}", replace(HEAD, num_ranks=3)
        cluster = ClusterCoordinator(CoordinatorStart(address, KEYS, facts, elsewhere=[1]))
        try:
            assert cluster.missing == [2]
            async with member(address, replace(NODE, num_ranks=3)) as (_, _, running):
                with pytest.raises(ConfigError, match="It has workers of another engine; give all nodes"):
                    await running
            async with member(address, replace(NODE, num_ranks=3, ranks=[2])):
                [node] = await cluster.all_joined()
                assert node.facts.ranks == [2]
        finally:
            cluster.close("the test is over.")

    run(test())


def test_a_clock_that_is_far_off_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = SimpleNamespace(time=lambda: time.time() + 60, monotonic=time.monotonic)
    monkeypatch.setattr("quire.core.cluster.participant.time", ahead)

    async def test() -> None:
        async with head() as (_, address), member(address) as (_, _, running):
            with pytest.raises(ConfigError, match=r"Its clock is \+60 s from node 0's"):
                await running

    run(test())


def test_a_message_that_waited_is_not_taken_for_a_clock_that_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.core.cluster.peer_clock.LATE_SECONDS", 0.3)

    async def answer_to(address: str, *ages: float, pause: float = 0.0) -> ToNode:
        """Node 0's answer to messages that say that they are so many seconds old."""
        answers: asyncio.Queue[list[bytes]] = asyncio.Queue()
        node = connect_dealer(f"tcp://{address}", KEYS, answers.put_nowait)
        try:
            for age in ages:
                node.send(control(Join(NODE, time.time() - age)))
                await asyncio.sleep(pause)
            _, payload = await answers.get()
            return msgspec.msgpack.decode(payload, type=ToNode)
        finally:
            node.close()

    async def test() -> None:
        async with head() as (_, address):
            refused = await answer_to(address, 20, 20, pause=0.5)
            assert isinstance(refused, JoinRefused)
            assert "Its clock is -20 s from node 0's" in refused.reason
            assert isinstance(await answer_to(address, 8, 7, 6, 5, 4), Joined)

    run(test())


class NameServer:
    """Tells the addresses of one name, which are not known at first."""

    NAME = "node-0.test"

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.addresses: list[str] = []
        self.num_asked = self.num_answered = 0
        self.answers = threading.Event()
        self.answers.set()
        self._ask_system = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self._ask)
        monkeypatch.setattr("quire.core.cluster.coordinator_connection.LOOK_UP_SECONDS", 0.05)
        monkeypatch.setattr("quire.core.cluster.coordinator_connection.CONNECT_SECONDS", 0.3)

    def _ask(self, host: str | bytes | None, *args: Any) -> Any:
        if host != self.NAME:
            return self._ask_system(host, *args)
        self.num_asked += 1
        self.answers.wait(100)
        self.num_answered += 1
        if not self.addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in self.addresses]


def named(address: str) -> str:
    return f"{NameServer.NAME}:{address.rpartition(':')[2]}"


def test_a_name_that_is_not_known_yet_is_waited_for_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("quire.core.cluster.participant.REMINDER_SECONDS", 2 * JOIN_SECONDS)  # the first one at once
    names = NameServer(monkeypatch)

    async def test() -> None:
        async with head() as (cluster, address), member(named(address), replace(NODE, address="")) as (_, _, running):
            while "(Name or service not known)" not in caplog.text:
                await asyncio.sleep(0.01)
            assert not running.done()
            names.addresses = ["127.0.0.1"]
            [node] = await cluster.all_joined()
            assert node.facts.address == "127.0.0.1"  # from which packets go there

    run(test())
    assert f"node 0 does not answer at {NameServer.NAME}:" in caplog.text


def test_a_node_waits_for_its_own_name_and_for_the_interface_that_has_the_address(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("quire.core.cluster.participant.REMINDER_SECONDS", JOIN_SECONDS)
    names, interfaces = NameServer(monkeypatch), psutil.net_if_addrs()
    up = [interfaces["lo"][0]._replace(address="192.0.2.1")]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)

    async def log_says(what: str) -> None:
        while what not in caplog.text:
            await asyncio.sleep(0.01)

    async def test() -> None:
        async with head() as (cluster, address), member(address, replace(NODE, address=NameServer.NAME)):
            await log_says("of which no address is known yet (Name or service not known)")
            names.addresses = ["192.0.2.1"]
            await log_says("no interface of this host has that address yet: it has ")
            assert cluster.missing == [1]
            interfaces["tunnel"] = up
            [node] = await cluster.all_joined()
            assert node.facts.address == "192.0.2.1"

    run(test())


def test_a_name_is_looked_up_until_there_is_a_connection_and_all_its_addresses_are_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = NameServer(monkeypatch)
    names.addresses = ["127.0.0.9"]  # nobody listens there

    async def test() -> None:
        async with head() as (cluster, address), member(named(address)) as (_, there, _):
            while names.num_asked < 3:
                await asyncio.sleep(0.01)
            assert cluster.missing == [1]
            names.addresses = ["127.0.0.8", "127.0.0.1"]
            [node] = await cluster.all_joined()
            num_asked = names.num_asked
            await asyncio.sleep(0.6)
            assert names.num_asked <= num_asked + 1
            node.send_to_workers(b"1")
            assert await there.inputs.get() == b"1"

    run(test())


def test_a_name_server_that_is_slow_holds_up_no_socket_and_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    names = NameServer(monkeypatch)
    names.answers.clear()

    async def test() -> None:
        async with head() as (cluster, address), member(named(address)):
            while not names.num_asked:
                await asyncio.sleep(0.01)
            async with member(address):
                await cluster.all_joined()

    run(test())
    assert names.num_answered == 0
    names.answers.set()


def test_a_rank_that_is_started_twice_is_refused_while_the_first_lives() -> None:
    async def test() -> None:
        async with head(replace(HEAD, num_ranks=3)) as (cluster, address):
            first, second = (replace(NODE, num_ranks=3, hostname=name) for name in ("first", "second"))
            async with member(address, first) as (_, _, running):
                while cluster.missing != [2]:
                    await asyncio.sleep(0.01)
                async with member(address, second) as (_, _, refused):
                    with pytest.raises(ConfigError, match=r"There is already node 1 \(first, 127.0.0.2\)"):
                        await refused
                assert not running.done()

    run(test())


def test_whoever_lacks_the_token_is_turned_away_and_the_port_survives_rubbish(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        thief = CurveKeys.generate()
        half = replace(thief, server_public=KEYS.server_public)  # knows the server's key alone
        async with (
            head() as (cluster, address),
            member(address, keys=thief),
            member(address, keys=half) as (_, _, running),
        ):
            for _ in range(20):
                with socket.create_connection(("127.0.0.1", int(address.split(":")[1]))) as scanner:
                    scanner.sendall(os.urandom(4096))
            while "without the join token was turned away" not in caplog.text:
                await asyncio.sleep(0.01)
            async with member(address):  # after them all, a node with the token joins
                await cluster.all_joined()
            assert not running.done()

    with caplog.at_level(logging.WARNING):
        run(test())
    assert caplog.text.count("turned away") == 1  # and not once for each


def test_silence_of_either_side_ends_the_membership(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "SILENCE_SECONDS", 1.2)

    async def test() -> None:
        async with head() as (cluster, address), member(address) as (participant, _, running):
            [node] = await cluster.all_joined()
            node.listener = here = Heard()
            started = time.monotonic()
            participant._try_to_send = lambda message: None  # type: ignore[method-assign]
            assert "silent" in str(await here.lost.get())
            assert time.monotonic() - started > 0.6
            assert "lost" in await running  # node 0 says so, in case that it is heard
        async with head() as (cluster, address), member(address) as (_, _, running):
            await cluster.all_joined()
            cluster._beating.cancel()
            assert "node 0 has been silent" in await running

    run(test())


def test_own_standstill_is_not_the_silence_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    peer = heartbeat.HeartbeatMonitor()
    now += 60.0  # this process was stopped
    assert not peer.is_lost()
    for _ in range(7):
        now += heartbeat.BEAT_SECONDS
        is_lost = peer.is_lost()
    assert is_lost


def test_an_address_that_cannot_be_listened_on_is_named() -> None:
    async def test() -> None:
        with pytest.raises(ConfigError, match=r"Nodes cannot join at 192\.0\.2\.1:29501: .*--master-addr must be"):
            ClusterCoordinator(CoordinatorStart("192.0.2.1:29501", KEYS, HEAD))
        flags = r"--data-parallel-address \(else --master-addr\) must .*--data-parallel-rpc-port \(else --master-port\)"
        with pytest.raises(ConfigError, match=flags):
            ClusterCoordinator(CoordinatorStart("192.0.2.1:29501", KEYS, replace(HEAD, division="engines")))

    run(test())
