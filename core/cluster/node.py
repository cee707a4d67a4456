"""A node: joins node 0 again and again, and works for it in between."""

import asyncio
import signal
from collections.abc import Callable
from typing import Protocol

from quire.core.cluster.messages import NodeStart, Order
from quire.core.cluster.participant import Participant
from quire.core.logging import get_logger

logger = get_logger(__name__)

ENDING = (signal.SIGTERM, signal.SIGINT)


class NodeWork(Protocol):
    """The work of a node in one session: carries out node 0's orders."""

    def on_order(self, order: Order) -> None:
        """Carries out an order. An exception ends the session, and both sides log the reason."""

    def on_input(self, message: bytes) -> None:
        """Passes a `WorkerInput` to all workers of this node. Fails as `on_order` does."""

    async def end(self) -> None:
        """Ends all that orders have started, and waits until its memory is free, because the session has ended."""


class Node:
    """Serves node 0 in one session after another. When node 0 is gone, the work ends, and the node joins anew. Use from
    one event loop.

    Args:
        make_work: makes the work of one session.
    """

    def __init__(self, start: NodeStart, make_work: Callable[[NodeStart, Participant], NodeWork]) -> None:
        self._start = start
        self._make_work = make_work
        self._participant: Participant | None = None
        self._work: NodeWork | None = None
        self._is_closing = False

    async def run_until_signal(self) -> None:
        """Runs until SIGTERM or SIGINT, which may have been blocked before. Raises as `run` does."""
        for number in ENDING:
            asyncio.get_running_loop().add_signal_handler(number, self.close)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        await self.run()

    async def run(self) -> None:
        """Serves node 0 until `close`.

        Raises:
            ConfigError: node 0 refuses this node as it was started.
        """
        while not self._is_closing:
            reason = await self._serve()
            if not self._is_closing:
                logger.warning("this node has ended its work: %s It waits for node 0 again.", reason)

    def close(self) -> None:
        """Makes `run` end the work, send node 0 the reason, and return."""
        self._is_closing = True
        if self._participant is not None:
            self._participant.leave("it was told to stop.", "host")

    async def _serve(self) -> str:
        """Joins and works. Returns why that ended."""
        start = self._start
        self._participant = participant = Participant(start.head, start.keys, start.facts, self)
        self._work = work = self._make_work(start, participant)
        try:
            return await participant.run()
        finally:
            await work.end()
            participant.close()

    def on_order(self, order: Order) -> None:
        assert self._work is not None
        self._work.on_order(order)

    def on_input(self, message: bytes) -> None:
        assert self._work is not None
        self._work.on_input(message)
