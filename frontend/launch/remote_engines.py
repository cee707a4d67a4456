"""Whole engines on other hosts, seen from node 0. Each is started by the node that has its number."""

import asyncio
from collections import defaultdict

from quire.core.cluster.coordinator import ClusterCoordinator, NodeLink
from quire.core.cluster.messages import CoordinatorStart, EndEngine, EngineEnded, EngineNews, EngineStarted, StartEngine
from quire.core.cluster.node_compatibility import name_ranks
from quire.core.config.resolved import EngineConfig
from quire.core.engine.launcher import EngineHandle
from quire.core.errors import EngineDeadError, EngineError, PeerLostError
from quire.core.wire.channel import CurveKeys
from quire.frontend.launch.ray_nodes import RayNodes
from quire.frontend.launch.shared_experts import Epochs


class RemoteEngine:
    """A handle on an engine on another host. Its process is a child of the node's process.

    Attributes:
        rendezvous: where the workers of other engines meet those of this one, if its node was to open that place.
    """

    def __init__(self, node: NodeLink, data: int, started: EngineStarted, keys: CurveKeys) -> None:
        self.address = started.address
        self.rendezvous = started.rendezvous
        self.keys: CurveKeys | None = keys
        self.pid: int | None = None
        self.is_owned = True
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[EngineEnded] = self._loop.create_future()
        self._node = node
        self._data = data
        self._is_over = False
        self._reason: PeerLostError | None = None

    async def wait(self) -> int:
        """Waits for the exit code. Raises EngineError when the engine's node is lost, or `end` has ended the engine."""
        ended = await asyncio.shield(self.ended)
        if self._reason is not None and ended.was_killed:
            raise self._reason
        return ended.code

    def end(self, reason: PeerLostError) -> None:
        """Kills the engine for `reason`, which `wait` raises unless the engine has ended or was killed before."""
        if not (self._is_over or self.ended.done()):
            self._reason = reason
        self.kill()

    def kill(self) -> None:
        self._is_over = True
        if not (self.ended.done() or self._loop.is_closed()):  # perhaps from another thread, as the program ends
            self._loop.call_soon_threadsafe(self._node.tell, EndEngine(self._data))

    async def wait_freed(self, seconds: float) -> None:
        """Returns at once. The memory is another host's, which waits for the engine's end before it starts the next
        one."""

    def join(self) -> None:
        """Returns at once, as `wait_freed` does."""


class RemoteNodes:
    """The nodes whose engines this server uses. They join from the first call of `start` on.

    Args:
        ray_nodes: starts the nodes; None: others do.

    Attributes:
        address: of this host, for the nodes.
        has_engines_here: see `EngineHosts`.
    """

    def __init__(self, start: CoordinatorStart, ray_nodes: RayNodes | None = None) -> None:
        self.address = start.facts.address
        self.has_engines_here = bool(start.facts.ranks)
        self._start = start
        self._ray_nodes = ray_nodes
        self._loop: asyncio.AbstractEventLoop | None = None
        self._coordinator: ClusterCoordinator | None = None
        self._starting: dict[int, asyncio.Future[RemoteEngine]] = {}  # by number of the engine
        self._running: dict[int, RemoteEngine] = {}
        self._nodes: defaultdict[NodeLink, set[int]] = defaultdict(set)

    async def all_joined(self) -> None:
        """Waits until all nodes have joined. Raises ConfigError if nodes cannot join at the address."""
        await self._open_coordinator().all_joined()

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
        node = await self._open_coordinator().node_with(data)
        if node.engine_listener is None:
            node.engine_listener = _NodeEngines(self, node)
        self._nodes[node].add(data)
        self._starting[data] = starting = asyncio.get_running_loop().create_future()
        node.tell(StartEngine(config, init_method, opens_rendezvous))
        return await starting

    @property
    def missing(self) -> list[int]:
        """The numbers of engines whose nodes have not joined."""
        own = self._start.facts
        return self._coordinator.missing if self._coordinator else sorted(set(range(own.num_ranks)) - set(own.ranks))

    @property
    def waits_for(self) -> str | None:
        return f"the host of engine {name_ranks(self.missing)}" if self.missing else None

    def close(self) -> None:
        """Releases all nodes, which end their engines. Idempotent."""
        head, self._coordinator = self._coordinator, None
        if head is not None and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._close_coordinator, head)
        if self._ray_nodes is not None:
            self._ray_nodes.close()

    def _close_coordinator(self, head: ClusterCoordinator) -> None:
        head.close("the server has ended.")
        for starting in self._starting.values():
            if not starting.done():
                starting.set_exception(EngineDeadError("the server has ended."))
                starting.exception()  # perhaps nobody waits for it any more

    def _open_coordinator(self) -> ClusterCoordinator:
        if self._coordinator is None:  # here, because a head needs the running loop
            self._loop = asyncio.get_running_loop()
            self._coordinator = ClusterCoordinator(self._start)
        if self._ray_nodes is not None:
            self._ray_nodes.ensure()
        return self._coordinator

    def on_engine(self, node: NodeLink, news: EngineNews) -> None:
        """Handles a node's news of an engine. Ignores engines that this node was not ordered to start."""
        if news.data not in self._nodes.get(node, ()):
            return
        starting, engine = self._starting.get(news.data), self._running.get(news.data)
        match news:
            case EngineStarted():
                if starting is not None and not starting.done():
                    self._running[news.data] = RemoteEngine(node, news.data, news, self._start.keys)
                    starting.set_result(self._running[news.data])
            case EngineEnded():
                if starting is not None and not starting.done():
                    how = news.reason or f"ended with exit code {news.code}."
                    starting.set_exception(EngineDeadError(f"engine {news.data} {how}"))
                if engine is not None and not engine.ended.done():
                    engine.ended.set_result(news)

    def on_lost(self, node: NodeLink, error: EngineError) -> None:
        """Handles the loss of a node, and of its engines with it."""
        for data in self._nodes.pop(node, ()):
            futures: list[asyncio.Future | None] = [self._starting.get(data)]
            if (engine := self._running.get(data)) is not None:
                futures.append(engine.ended)
            for future in futures:
                if future is not None and not future.done():
                    future.set_exception(error)
                    future.exception()  # perhaps nobody waits for it any more


class _NodeEngines:
    """Passes on one node's news."""

    def __init__(self, nodes: RemoteNodes, node: NodeLink) -> None:
        self._nodes = nodes
        self._node = node

    def on_engine(self, news: EngineNews) -> None:
        self._nodes.on_engine(self._node, news)

    def on_lost(self, error: EngineError) -> None:
        self._nodes.on_lost(self._node, error)


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

    async def launch(self) -> EngineHandle:
        """Starts the engine when its node, and those of engines that share experts with it, have joined."""
        if self._epochs is None:
            return await self._nodes.start(self.config)
        await self._epochs.wait_for_hosts(self.config.place.data)
        epoch = self._epochs.epoch_of(self.config.place.data)
        init_method = await epoch.port.for_remote_engine()
        engine = await self._nodes.start(self.config, init_method, opens_rendezvous=init_method is None)
        if engine.rendezvous is not None:
            epoch.port.on_opened(engine.rendezvous)
        epoch.add(engine)
        return engine

    def retire(self) -> None:
        if self._epochs is not None:
            self._epochs.retire()

    def close(self) -> None:
        self._nodes.close()
