"""Node 0's end of a check, over a real socket, and nodes that say what it cannot take."""

import asyncio

import msgspec
import pytest
from msgspec.structs import replace

from quire.core.cluster.check import CheckHead
from quire.core.cluster.check_messages import CHECK, CheckStart, Hello, NodeReport, ToChecked, Verdict, checking
from quire.core.wire.channel import connect_dealer
from tests.core.cluster.test_joining import HEAD, KEYS, NODE, run
from tests.servers import free_port


@pytest.mark.parametrize(
    ("frames", "problem"),
    [
        ([CHECK, msgspec.msgpack.encode(["hello", "of another version"])], "A node says what node 0 cannot read"),
        ([CHECK], "A node says what node 0 cannot read"),
        (checking(Hello(NodeReport(replace(NODE, ranks=[]), "", 0, []), "", 0.0)), "gives it number none"),
    ],
    ids=["another-version", "one-frame", "no-number"],
)
def test_a_node_that_cannot_be_understood_is_told_so(
    frames: list[bytes], problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        address, answers = f"127.0.0.1:{free_port()}", asyncio.Queue[list[bytes]]()
        head = CheckHead(CheckStart([address], KEYS, NodeReport(HEAD, "", 0, [])))
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
