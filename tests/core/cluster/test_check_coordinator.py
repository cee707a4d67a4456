"""Node 0's end of a check, over a real socket, and nodes that say what it cannot take."""

import asyncio
import time
from functools import partial

import msgspec
import pytest
from msgspec.structs import replace

from quire.core.cluster.check_coordinator import CheckCoordinator
from quire.core.cluster.check_messages import (
    CHECK,
    CheckStart,
    Farewell,
    Hello,
    Measure,
    Measured,
    NodeReport,
    ToChecked,
    Verdict,
    checking,
)
from quire.core.cluster.probe import Probe
from quire.core.wire.channel import connect_dealer
from tests.core.cluster.test_joining import HEAD, KEYS, NODE, run
from tests.servers import free_port


@pytest.mark.parametrize(
    ("frames", "problem"),
    [
        (
            [CHECK, msgspec.msgpack.encode(["hello", "of another version"])],
            "A node at 127.0.0.1 says what node 0 cannot read",
        ),
        ([CHECK], "A node at 127.0.0.1 says what node 0 cannot read"),
        (checking(Hello(NodeReport(replace(NODE, ranks=[]), "", 0, []), "", 0.0)), "gives it number none"),
    ],
    ids=["another-version", "one-frame", "no-number"],
)
def test_a_node_that_cannot_be_understood_is_told_so(
    frames: list[bytes], problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        address, answers = f"127.0.0.1:{free_port()}", asyncio.Queue[list[bytes]]()
        head = CheckCoordinator(CheckStart([address], KEYS, NodeReport(HEAD, "", 0, [])))
        node = connect_dealer(f"tcp://{address}", KEYS, answers.put_nowait)
        try:
            for _ in range(2):
                node.send(frames)
                _, payload = await answers.get()
                verdict = msgspec.msgpack.decode(payload, type=ToChecked)
                assert isinstance(verdict, Verdict)
                assert problem in verdict.problems[0]
        finally:
            node.close()
            head.close()

    run(test())
    assert caplog.text.count(problem) == 1  # and not each time


@pytest.mark.parametrize(
    ("ages", "pause", "problems"),
    [
        ([8, 7, 6, 0], 0.0, []),
        ([20, 20], 0.5, ["Node 1 (there, 127.0.0.2): Its clock is -20 s from node 0's; synchronize the clocks (NTP)."]),
    ],
    ids=["messages-that-waited", "a-clock-that-is-behind"],
)
def test_a_message_that_waited_is_not_taken_for_a_clock_that_is_behind(
    ages: list[float], pause: float, problems: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.core.cluster.peer_clock.LATE_SECONDS", 0.3)

    async def test() -> None:
        address, answers = f"127.0.0.1:{free_port()}", asyncio.Queue[list[bytes]]()
        head, probe = (
            CheckCoordinator(CheckStart([address], KEYS, NodeReport(HEAD, "", 0, []))),
            Probe("127.0.0.1", KEYS),
        )
        node = connect_dealer(f"tcp://{address}", KEYS, answers.put_nowait)
        try:
            checking_all = asyncio.create_task(head.run(patience=30))
            for age in ages:
                node.send(checking(Hello(NodeReport(NODE, "", 0, []), probe.endpoint, time.time() - age)))
                await asyncio.sleep(pause)
            message: ToChecked | None = None
            while not isinstance(message, Verdict):
                _, payload = await answers.get()
                message = msgspec.msgpack.decode(payload, type=ToChecked)
                if isinstance(message, Measure):
                    node.send(checking(Measured(message.number, 1.0)))
            node.send(checking(Farewell()))
            findings = await checking_all
            assert message.problems == findings.problems == problems
            assert findings.seconds_apart[1] == pytest.approx(-ages[-1], abs=2)
        finally:
            node.close()
            probe.close()
            head.close()

    run(test())


def test_a_late_answer_is_not_taken_for_that_of_the_next_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 1 is asked to measure towards node 2, and answers when it is asked for node 0."""
    monkeypatch.setattr("quire.core.cluster.check_coordinator.LIMIT_SECONDS", 0.1)
    monkeypatch.setattr("quire.core.cluster.check_coordinator.ANSWER_SECONDS", 0.4)

    async def test() -> None:
        address, probe = f"127.0.0.1:{free_port()}", Probe("127.0.0.1", KEYS)
        head = CheckCoordinator(CheckStart([address], KEYS, NodeReport(replace(HEAD, num_ranks=3), "", 0, [])))
        late: list[Measure] = []

        def on_frames(rank: int, frames: list[bytes]) -> None:
            match msgspec.msgpack.decode(frames[1], type=ToChecked):
                case Measure() as asked if rank == 1 and not late:
                    late.append(asked)
                case Measure() as asked:
                    if rank == 1:
                        nodes[1].send(checking(Measured(late[0].number, 2.0)))
                    nodes[rank].send(checking(Measured(asked.number, 1.0)))
                case Verdict():
                    nodes[rank].send(checking(Farewell()))

        nodes = {rank: connect_dealer(f"tcp://{address}", KEYS, partial(on_frames, rank)) for rank in (1, 2)}
        try:
            for rank, node in nodes.items():
                report = NodeReport(replace(NODE, num_ranks=3, ranks=[rank], address=f"127.0.0.{rank + 1}"), "", 0, [])
                node.send(checking(Hello(report, probe.endpoint, time.time())))
            latencies = (await head.run(patience=30)).links["latency"]
            assert {pair: latencies.get(pair) for pair in ((1, 2), (1, 0), (2, 0))} == {
                (1, 2): None,
                (1, 0): 1,
                (2, 0): 1,
            }
        finally:
            for node in nodes.values():
                node.close()
            probe.close()
            head.close()

    run(test())
