"""The executor `mp`: a process for each worker. Plans go to each host with workers; all results come back.

This file knows neither processes nor rings: see `worker_host`. It must not import torch.
"""

import asyncio
from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from quire.core.config.resolved import EngineConfig
from quire.core.errors import ConfigError, EngineError, ModelLoadError, NoMemoryError, PeerLostError
from quire.core.wire.kv_groups import KVGroupSpec, shares_prefixes
from quire.core.wire.protocol import (
    AllocateCache,
    EngineReady,
    LoadModel,
    StepPlan,
    StepResult,
    WorkerAnswer,
    WorkerFailed,
    WorkerOutput,
    WorkerReady,
    encoder,
)
from quire.core.wire.rank import Rank
from quire.executor.processes.pending_calls import PendingCalls
from quire.executor.processes.placement import OneHost, WorkerPlacement
from quire.executor.processes.result_inbox import ResultInbox
from quire.executor.processes.slot_grammars import SlotGrammars
from quire.executor.processes.worker_host import WorkerHost

DEFAULT_FACTORY = "quire.executor.processes.worker_factory:create_worker"


class MultiProcExecutor:
    """Runs the workers of `config.layout`. Implements `quire.core.engine.Executor`.

    Args:
        factory: qualified name of a function that builds a worker in its process from (config, rank, init_method).
        placement: finds the hosts of the workers; None: they are all on this host.
    """

    def __init__(
        self, config: EngineConfig, *, factory: str = DEFAULT_FACTORY, placement: WorkerPlacement | None = None
    ) -> None:
        stages = config.layout.pipeline
        # Rows of plans in different stages do not wait for one another's tokens, so plans are always made ahead.
        # With shared experts, a worker whose plan arrives after a step has started would miss that step.
        is_ahead = config.limits.async_scheduling or config.layout.shares_experts
        self.depth = stages if stages > 1 else 2 if is_ahead else 1
        self._config = config
        self._factory = factory
        self._encoder = encoder()
        self._decoder: msgspec.msgpack.Decoder[WorkerOutput] = msgspec.msgpack.Decoder(WorkerOutput)
        self._grammars = SlotGrammars()
        self._results = ResultInbox()
        self._calls = PendingCalls(config.layout.num_workers)
        self._placement = placement or OneHost(config)
        self._hosts: list[WorkerHost] = []
        self._ready: dict[Rank, asyncio.Future[WorkerReady]] = {}
        self._failure: EngineError | ConfigError | None = None
        self._blaming: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def pids(self) -> list[int]:
        return [pid for host in self._hosts for pid in host.pids]

    @property
    def stopped(self) -> list[str]:
        return [name for host in self._hosts for name in host.stopped]

    async def prepare(self) -> None:
        """Starts the workers, which import everything and wait."""
        await self._start_workers()

    async def start(self) -> EngineReady:
        """Starts the workers and loads the model on all of them.

        Raises:
            ModelLoadError: the checkpoint or the options are at fault; a restart would fail the same way.
            EngineError: a worker died.
        """
        if not self._hosts:
            await self.prepare()
        self._send(self._encoder.encode(LoadModel()))
        loaded = await self._all_ready()
        kv_groups = _agreed_groups(loaded)
        agreed = AllocateCache(
            num_pages=min(ready.num_pages for ready in loaded),
            max_model_len=min(ready.max_model_len for ready in loaded),
        )
        self._send(self._encoder.encode(agreed))
        await self._all_ready()
        return EngineReady(
            num_pages=agreed.num_pages,
            block_size=self._config.limits.block_size,
            max_model_len=agreed.max_model_len,
            weights_bytes=sum(ready.weights_bytes for ready in loaded),
            kv_cache_bytes=sum(ready.kv_cache_bytes * agreed.num_pages // max(1, ready.num_pages) for ready in loaded),
            device_name=loaded[0].device_name,
            kv_groups=kv_groups,
            caches_prefixes=self._config.limits.enable_prefix_caching
            and shares_prefixes(kv_groups, whole_prompts=loaded[0].whole_prompts),
            whole_prompts=loaded[0].whole_prompts,
            reads=loaded[0].reads,
            media_spans=loaded[0].media_spans,
            media_rows=loaded[0].media_rows,
        )

    def submit(self, plan: StepPlan) -> None:
        """Sends a plan to all workers. Never blocks."""
        for new in plan.admitted:
            if new.grammar is not None:
                self._share(new.grammar.vocabulary_path)
        self._send(self._encoder.encode(self._grammars.without_known(plan)))

    async def next_result(self) -> StepResult:
        """The oldest result that has not been taken. Raises EngineError when there will be none."""
        return await self._results.get()

    def when_failed(self, call: Callable[[], None]) -> None:
        self._results.when_failed(call)

    async def call(self, name: str, payload: bytes) -> list[bytes]:
        """Every worker's answer to a call, by rank. Raises EngineError if a worker fails at it."""
        call, answer = self._calls.open(name, payload)
        self._send(self._encoder.encode(call))
        return await answer

    async def close(self, *, hung: bool) -> None:
        """Ends the workers and frees their rings. Idempotent.

        Args:
            hung: makes each worker write its stack to stderr.
        """
        if self._closed:
            return
        self._closed = True
        if self._blaming is not None:
            self._blaming.cancel()
        closed = EngineError("The executor was closed before this step was done.")
        self._results.fail(closed)
        self._calls.fail(closed)
        try:
            await asyncio.gather(*(host.close(hung=hung) for host in self._hosts))
        finally:
            self._hosts.clear()
            self._placement.close()

    @property
    def waits_for(self) -> str | None:
        return self._placement.waits_for

    async def _start_workers(self) -> None:
        self._expect_ready(self._config.layout.ranks(self._config.place.data))
        self._hosts = await self._placement.find_hosts(self._factory, self)
        for host in self._hosts:
            host.start()

    # ---------------------------------------------------------------------------------------------------- messages

    def _send(self, message: bytes) -> None:
        if self._closed or self._failure is not None:
            return
        for host in self._hosts:
            host.send(message)

    def _share(self, path: str) -> None:
        if self._closed or self._failure is not None:
            return
        for host in self._hosts:
            host.share(path)

    def on_output(self, message: bytes) -> None:
        match self._decoder.decode(message):
            case StepResult() as result:
                self._results.put(result)
            case WorkerAnswer() as answer:
                self._calls.add(answer)
            case WorkerReady() as ready:
                if not (future := self._ready[ready.rank]).done():
                    future.set_result(ready)
            case WorkerFailed() as failed:
                self._on_failed(failed)

    def on_lost(self, error: EngineError) -> None:
        if not isinstance(error, PeerLostError):
            self._fail(error)
        elif self._blaming is None and not self._closed:
            self._blaming = asyncio.create_task(self._blame_peer(error))

    async def _blame_peer(self, error: PeerLostError) -> None:
        """Fails with `error`, unless a worker of this engine turns out to be the lost one."""
        try:
            await asyncio.gather(*(host.await_exits() for host in self._hosts))
        finally:
            # Without shared experts, the lost peer cannot belong to another engine.
            self._fail(error if self._config.layout.shares_experts else EngineError(str(error)))

    def _on_failed(self, failed: WorkerFailed) -> None:
        match failed.cause:
            case "setting" | "memory":
                layout = self._config.layout
                where = f"Worker {failed.rank} on node {layout.node(failed.rank)}: " if layout.nodes > 1 else ""
                kind = NoMemoryError if failed.cause == "memory" else ModelLoadError
                self._fail(kind(where + failed.message))
            case "peer":
                self.on_lost(PeerLostError(f"Worker {failed.rank} failed: {failed.message}"))
            case _:
                self._fail(EngineError(f"Worker {failed.rank} failed: {failed.message}"))

    def _fail(self, error: EngineError | ConfigError) -> None:
        """Fails all waiting callers with the first error; the engine then closes this executor."""
        if self._failure is None:
            self._failure = error
        for ready in self._ready.values():
            if not ready.done():
                ready.set_exception(error)
                ready.exception()  # marks it as retrieved: `start` raises only the first
        failed = error if isinstance(error, EngineError) else EngineError(str(error))
        self._results.fail(failed)
        self._calls.fail(failed)

    def _expect_ready(self, ranks: list[Rank]) -> None:
        loop = asyncio.get_running_loop()
        self._ready = {rank: loop.create_future() for rank in ranks}

    async def _all_ready(self) -> list[WorkerReady]:
        """Returns each rank's next report that it is ready, by rank, and expects another report of each."""
        loaded = await asyncio.gather(*self._ready.values())
        self._expect_ready(list(self._ready))
        if self._failure is not None:  # set while the answers were collected
            raise self._failure
        return loaded


def _agreed_groups(loaded: list[WorkerReady]) -> list[KVGroupSpec]:
    """Returns the KV groups that all workers declare, with the page bytes of the first: block tables are the same for
    all.

    Raises:
        ModelLoadError: layers, kinds or windows differ.
    """
    first, *others = loaded
    expected = _without_bytes(first)
    for ready in others:
        if (groups := _without_bytes(ready)) != expected:
            raise ModelLoadError(
                f"Worker {ready.rank} declares other KV groups than worker {first.rank}: {groups} and not {expected}. "
                "All workers must load the same checkpoint with the same version of Quire."
            )
    return first.kv_groups


def _without_bytes(ready: WorkerReady) -> list[KVGroupSpec]:
    """Returns the groups without the bytes of pages, which only determine the number of a snapshot's pages."""
    return [group if group.interval else replace(group, page_bytes=0) for group in ready.kv_groups]
