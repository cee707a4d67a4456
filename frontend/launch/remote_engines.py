"""Whole engines on other hosts, seen from node 0: each is started by the node that has its number."""

import asyncio
from collections import defaultdict

from quire.core.cluster.head import ClusterHead, NodeLink
from quire.core.cluster.messages import EndEngine, EngineEnded, EngineStarted, HeadStart, StartEngine
from quire.core.config.resolved import EngineConfig
from quire.core.engine.supervisor import EngineHandle
from quire.core.errors import EngineDeadError, EngineError
from quire.core.wire.channel import CurveKeys
from quire.frontend.launch.ray_nodes import RayNodes


class RemoteEngine:
    """See `EngineHandle`. The engine's process is a child of the node's own."""

    def __init__(self, node: NodeLink, data: int, address: str, keys: CurveKeys) -> None:
        self.address = address
        self.keys: CurveKeys | None = keys
        self.pid: int | None = None
        self.is_owned = True
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[int] = self._loop.create_future()
        self._node = node
        self._data = data

    async def wait(self) -> int:
        """See `EngineHandle.wait`. Raises EngineError when the engine's node is lost."""
        return await asyncio.shield(self.ended)

    def kill(self) -> None:
        """See `EngineHandle.kill`."""
        if not (self.ended.done() or self._loop.is_closed()):  # perhaps from another thread, as the program ends
            self._loop.call_soon_threadsafe(self._node.tell, EndEngine(self._data))


class RemoteNodes:
    """The nodes whose engines this server uses. They join from the first call of `start` on.

    Args:
        ray_nodes: starts the nodes; None: others do.
    """

    def __init__(self, start: HeadStart, ray_nodes: RayNodes | None = None) -> None:
        self._start = start
        self._ray_nodes = ray_nodes
        self._loop: asyncio.AbstractEventLoop | None = None
        self._head: ClusterHead | None = None
        self._starting: dict[int, asyncio.Future[str]] = {}  # addresses, by number of the engine
        self._running: dict[int, RemoteEngine] = {}
        self._nodes: defaultdict[NodeLink, set[int]] = defaultdict(set)

    async def start(self, config: EngineConfig) -> EngineHandle:
        """Starts an engine on the node that has its number, once that is there.

        Raises:
            ConfigError: nodes cannot join at the address.
            EngineError: the node is lost meanwhile, or cannot start the engine.
        """
        if self._head is None:  # here, because a head needs the running loop
            self._loop = asyncio.get_running_loop()
            self._head = ClusterHead(self._start)
        if self._ray_nodes is not None:
            self._ray_nodes.ensure()
        data = config.place.data
        node = await self._head.node_with(data)
        if node.engine_listener is None:
            node.engine_listener = _NodeEngines(self, node)
        self._nodes[node].add(data)
        self._starting[data] = starting = asyncio.get_running_loop().create_future()
        node.tell(StartEngine(config))
        address = await starting
        engine = self._running[data] = RemoteEngine(node, data, address, self._start.keys)
        return engine

    def has_node_with(self, data: int) -> bool:
        """Whether the node with an engine's number has joined."""
        return self._head is not None and data not in self._head.missing

    def close(self) -> None:
        """Lets all nodes go, which end their engines. Idempotent."""
        head, self._head = self._head, None
        if head is not None and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(head.close, "the server has ended.")
        if self._ray_nodes is not None:
            self._ray_nodes.close()

    def on_engine(self, news: EngineStarted | EngineEnded) -> None:
        """A node has said something of an engine."""
        starting, engine = self._starting.get(news.data), self._running.get(news.data)
        match news:
            case EngineStarted():
                if starting is not None and not starting.done():
                    starting.set_result(news.address)
            case EngineEnded():
                if starting is not None and not starting.done():
                    starting.set_exception(EngineDeadError(f"engine {news.data} ended with exit code {news.code}."))
                if engine is not None and not engine.ended.done():
                    engine.ended.set_result(news.code)

    def on_lost(self, node: NodeLink, error: EngineError) -> None:
        """A node is lost, and its engines with it."""
        for data in self._nodes.pop(node, ()):
            futures: list[asyncio.Future | None] = [self._starting.get(data)]
            if (engine := self._running.get(data)) is not None:
                futures.append(engine.ended)
            for future in futures:
                if future is not None and not future.done():
                    future.set_exception(error)
                    future.exception()  # perhaps nobody waits for it any more


class _NodeEngines:
    """See `EngineListener`."""

    def __init__(self, nodes: RemoteNodes, node: NodeLink) -> None:
        self._nodes = nodes
        self._node = node

    def on_engine(self, news: EngineStarted | EngineEnded) -> None:
        self._nodes.on_engine(news)

    def on_lost(self, error: EngineError) -> None:
        self._nodes.on_lost(self._node, error)


class RemoteLauncher:
    """See `Launcher`: starts the engine of one number on its node."""

    def __init__(self, config: EngineConfig, nodes: RemoteNodes) -> None:
        self.config = config
        self._nodes = nodes

    @property
    def waits_for(self) -> str | None:
        """See `Launcher.waits_for`."""
        data = self.config.place.data
        return None if self._nodes.has_node_with(data) else f"the host of engine {data}"

    def launch_ahead(self) -> None:
        """The node need not be there yet, so there is nothing to do."""

    async def launch(self) -> EngineHandle:
        """See `Launcher.launch`. Waits for the node."""
        return await self._nodes.start(self.config)

    def close(self) -> None:
        """See `Launcher.close`."""
        self._nodes.close()
