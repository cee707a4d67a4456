"""The workers of one engine on another host: messages go unchanged to the node's process and back."""

import asyncio
from pathlib import Path

from quire.core.cluster.coordinator import NodeLink
from quire.core.cluster.heartbeat import BEAT_SECONDS, SILENCE_SECONDS
from quire.core.cluster.messages import Ended, ShareFile, StartWorkers
from quire.executor.processes.worker_host import HostListener


class RemoteHost:
    """Workers behind a node's link, which delivers their messages to `listener`."""

    def __init__(self, node: NodeLink, start: StartWorkers, listener: HostListener) -> None:
        self._node = node
        self._start = start
        self._shared: set[str] = set()
        node.listener = listener

    def start(self) -> None:
        self._node.tell(self._start)

    def send(self, message: bytes) -> None:
        """Sends one copy to the node, which writes it into the ring there."""
        self._node.send_to_workers(message)

    def share(self, path: str) -> None:
        """Sends a file to the node, once."""
        if path not in self._shared:
            self._shared.add(path)
            self._node.tell(ShareFile(path, Path(path).read_bytes()))

    @property
    def pids(self) -> list[int]:
        return []

    @property
    def stopped(self) -> list[str]:
        return []

    async def await_exits(self) -> None:
        """Waits until the node has reported a worker's end, or its own heartbeats are missed."""
        await asyncio.sleep(SILENCE_SECONDS + 2 * BEAT_SECONDS)

    async def close(self, *, hung: bool) -> None:
        """Asks the node to end the workers. It also does so when it no longer hears this host."""
        self._node.tell(Ended("the engine hangs." if hung else "the engine has ended."))
