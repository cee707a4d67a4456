"""Where the workers of engines meet that are all on other hosts than their server."""

import asyncio

import pytest

from quire.core.cluster.engine_hosts import EngineHosts
from quire.core.cluster.join_token import JoinToken
from quire.core.cluster.messages import CoordinatorStart
from quire.core.cluster.node_compatibility import NodeFacts
from quire.core.errors import PeerLostError
from quire.frontend.launch.shared_experts import EpochCoordinator

KEYS = JoinToken("t" * 32).keys()
ALONE = NodeFacts("engines", [], 2, "127.0.0.1", "here", "1.0", {}, "d")
"""Node 0 without engines."""


def test_engines_meet_on_the_host_of_the_first_and_are_told_if_that_ends_before() -> None:
    async def run() -> None:
        together = EpochCoordinator(EngineHosts(CoordinatorStart("127.0.0.1:29501", KEYS, ALONE), release=""))
        first = together.epoch_of(1).port
        assert await first.for_remote_engine() is None  # the host of engine 1 opens a port
        waiting = asyncio.create_task(together.epoch_of(0).port.for_remote_engine())
        await asyncio.sleep(0)
        assert not waiting.done()

        second = together.epoch_of(1).port  # engine 1 has ended, and is started again
        with pytest.raises(PeerLostError, match="the others were to meet has ended"):
            await waiting
        first.on_opened("tcp://10.0.0.1:1")  # too late
        assert await second.for_remote_engine() is None
        second.on_opened("tcp://10.0.0.2:2")
        assert await together.epoch_of(0).port.for_remote_engine() == "tcp://10.0.0.2:2"

    asyncio.run(run())
