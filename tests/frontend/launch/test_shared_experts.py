"""Where the workers of engines meet that are all on other hosts than their server."""

import asyncio

import pytest

from quire.core.errors import PeerLostError
from quire.frontend.launch.shared_experts import EpochCoordinator


class OtherHosts:
    """They run all engines, and are there."""

    address = "127.0.0.1"
    has_engines_here = False
    waits_for = None

    async def all_joined(self) -> None: ...


def test_engines_meet_on_the_host_of_the_first_and_are_told_if_that_ends_before() -> None:
    async def run() -> None:
        together = EpochCoordinator(OtherHosts())
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
