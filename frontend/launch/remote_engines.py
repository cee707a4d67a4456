"""Whole engines on other hosts, seen from node 0. Each is started by the node that has its number."""

import asyncio

from quire.core.cluster.coordinator import ClusterCoordinator, NodeLink
from quire.core.cluster.engine_hosts import EngineHosts
from quire.core.cluster.messages import CoordinatorStart, EndEngine, EngineEnded, EngineNews, EngineStarted, StartEngine
from quire.core.config.resolved import EngineConfig
from quire.core.engine.running_engine import RunningEngine
from quire.core.errors import EngineDeadError, QuireError
from quire.core.wire.channel import CurveKeys
from quire.frontend.launch.ray_nodes import RayNodes
from quire.frontend.launch.shared_experts import Epochs


class RemoteEngine(RunningEngine):
    """An engine that a node was ordered to start. Its process is a child of the node's process.

    Attributes:
        started: done when the engine has an address.
        ended: done when the node has reported the end.
    """

    def __init__(self, node: NodeLink, data: int, keys: CurveKeys) -> None:
        super().__init__("", keys, pid=None)
        self._loop = asyncio.get_running_loop()
        self.started: asyncio.Future[EngineStarted] = self._loop.create_future()
        self.ended: asyncio.Future[EngineEnded] = self._loop.create_future()
        self.node = node
        self._data = data

    def on_started(self, news: EngineStarted) -> None:
        """Handles the node's answer to the order."""
        if not self.started.done():
            self.address = news.address
            self.started.set_result(news)

    def on_ended(self, news: EngineEnded) -> None:
        """Handles the end of the process, or its failed start."""
        how = news.reason or f"ended with exit code {news.code}."
        self.fail_start(EngineDeadError(f"engine {self._data} {how}"))
        if not self.ended.done():
            self.ended.set_result(news)

    def on_lost(self, error: QuireError) -> None:
        """Handles the loss of the node."""
        self.fail_start(error)
        _fail(self.ended, error)

    def fail_start(self, error: QuireError) -> None:
        """Makes a start raise that still waits for the node."""
        _fail(self.started, error)

    async def _exit_code(self) -> int:
        ended = await asyncio.shield(self.ended)
        self.was_killed = ended.was_killed
        return ended.code

    def _kill(self) -> None:
        if not (self.ended.done() or self._loop.is_closed()):  # perhaps from another thread, as the program ends
            self._loop.call_soon_threadsafe(self.node.tell, EndEngine(self._data))


def _fail(future: asyncio.Future, error: QuireError) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # perhaps nobody waits for it any more


class RemoteNodes(EngineHosts):
    """The nodes whose engines this server starts and uses.

    Args:
        ray_nodes: starts the nodes; None: others do.
    """

    def __init__(self, start: CoordinatorStart, ray_nodes: RayNodes | None = None) -> None:
        super().__init__(start, release="the server has ended.")
        self._keys = start.keys
        self._ray_nodes = ray_nodes
        self._engines: dict[int, RemoteEngine] = {}  # the last one of each number

    async def start(
        self, config: EngineConfig, init_method: str | None = None, *, opens_rendezvous: bool = False
    ) -> RemoteEngine:
        """Starts an engine on the node that has its number, once that node has joined.

        Args:
            init_method: where its ranks meet those of other engines; None: they do not, or at a place of its node.
            opens_rendezvous: its node shall open that place.

        Raises:
            ConfigError: nodes cannot join at the address.
            EngineError: the node is lost meanwhile, or cannot start the engine.
        """
        data = config.place.data
        node = await self._open().node_with(data)
        self._engines[data] = engine = RemoteEngine(node, data, self._keys)
        node.tell(StartEngine(config, init_method, opens_rendezvous))
        await engine.started
        return engine

    def close(self) -> None:
        super().close()
        if self._ray_nodes is not None:
            self._ray_nodes.close()

    def _open(self) -> ClusterCoordinator:
        coordinator = super()._open()
        if self._ray_nodes is not None:
            self._ray_nodes.ensure()
        return coordinator

    def _close(self, coordinator: ClusterCoordinator) -> None:
        super()._close(coordinator)
        for engine in self._engines.values():
            engine.fail_start(EngineDeadError("the server has ended."))

    def on_engine(self, node: NodeLink, news: EngineNews) -> None:
        """Handles a node's news of an engine. Ignores engines that this node was not ordered to start."""
        engine = self._engines.get(news.data)
        if engine is None or engine.node is not node:
            return
        match news:
            case EngineStarted():
                engine.on_started(news)
            case EngineEnded():
                engine.on_ended(news)

    def on_node_lost(self, node: NodeLink, error: QuireError) -> None:
        """Handles the loss of a node, and of its engines with it."""
        for engine in self._engines.values():
            if engine.node is node:
                engine.on_lost(error)


class RemoteLauncher:
    """Launches the engine of one number on its node.

    Args:
        epochs: of the engines that share experts with this one, if any.
    """

    def __init__(self, config: EngineConfig, nodes: RemoteNodes, epochs: Epochs | None = None) -> None:
        self.config = config
        self._nodes = nodes
        self._epochs = epochs

    @property
    def waits_for(self) -> str | None:
        if self._epochs is not None:
            return self._epochs.waits_for
        data = self.config.place.data
        return f"the host of engine {data}" if data in self._nodes.missing else None

    def launch_ahead(self) -> None:
        """Does nothing, because the node need not have joined yet."""

    def warm_up(self) -> None:
        """Does nothing: an engine of another host has no spare one."""

    async def launch(self) -> RemoteEngine:
        """Starts the engine when its node, and those of engines that share experts with it, have joined."""
        if self._epochs is None:
            return await self._nodes.start(self.config)
        await self._epochs.wait_for_hosts(self.config.place.data)
        epoch = self._epochs.epoch_of(self.config.place.data)
        init_method = await epoch.port.for_remote_engine()
        engine = await self._nodes.start(self.config, init_method, opens_rendezvous=init_method is None)
        if (opened := engine.started.result().rendezvous) is not None:
            epoch.port.on_opened(opened)
        epoch.add(engine)
        return engine

    def retire(self) -> None:
        if self._epochs is not None:
            self._epochs.retire()

    def close(self) -> None:
        self._nodes.close()
