"""The workers of one engine on another host, seen from the engine: messages go to the node's agent as they are."""

import asyncio
from pathlib import Path

from quire.core.cluster.head import NodeLink
from quire.core.cluster.messages import Ended, ShareFile, StartWorkers
from quire.core.cluster.silence import BEAT_SECONDS, SILENCE_SECONDS
from quire.executor.processes.worker_host import HostListener


class RemoteHost:
    """See `WorkerHost`. What the workers say comes from the node's link to `listener`."""

    def __init__(self, node: NodeLink, start: StartWorkers, listener: HostListener) -> None:
        self._node = node
        self._start = start
        self._shared: set[str] = set()
        node.listener = listener

    def start(self) -> None:
        self._node.tell(self._start)

    def send(self, message: bytes) -> None:
        """See `WorkerHost.send`. One copy goes to the node, whose agent writes it into the ring there."""
        self._node.send_to_workers(message)

    def share(self, path: str) -> None:
        """See `WorkerHost.share`. A file is sent once."""
        if path not in self._shared:
            self._shared.add(path)
            self._node.tell(ShareFile(path, Path(path).read_bytes()))

    async def hear_ends(self) -> None:
        """See `WorkerHost.hear_ends`. By then the node has told of a worker's end, or is missed itself."""
        await asyncio.sleep(SILENCE_SECONDS + 2 * BEAT_SECONDS)

    async def close(self, *, hung: bool) -> None:
        """See `WorkerHost.close`. The agent ends the workers by itself, too, when it does not hear this host."""
        self._node.tell(Ended("the engine hangs." if hung else "the engine has ended."))
