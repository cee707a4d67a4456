"""Shares routing between API servers: each server reports to the others which prompts it sent to which engine."""

import asyncio
from array import array
from collections.abc import Callable, Sequence

from quire.frontend.servers.messages import Placed

PUBLISH_SECONDS = 0.01
"""The time for which reports are collected, so that a busy server sends few messages."""


class PlacedPrompts:
    """Reports the prompts of this server to the others, through their parent.

    Args:
        send: sends a message to the parent.
    """

    def __init__(self, send: Callable[[Placed], None]) -> None:
        self._send = send
        self._unpublished: list[tuple[int, bytes]] = []

    def add(self, engine: int, blocks: Sequence[int]) -> None:
        """Notes that a prompt of these blocks went to an engine."""
        if not self._unpublished:
            asyncio.get_running_loop().call_later(PUBLISH_SECONDS, self._publish)
        self._unpublished.append((engine, array("q", blocks).tobytes()))

    def _publish(self) -> None:
        placed, self._unpublished = self._unpublished, []
        self._send(Placed(placed))


def blocks_of(names: bytes) -> Sequence[int]:
    """The names of a prompt's blocks in a `Placed`."""
    return array("q", names)
