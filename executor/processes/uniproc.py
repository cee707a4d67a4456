"""The executor `uni`: one worker in a thread of the engine's process, so the engine's event loop stays free.

This file must not import torch: the thread does, while the event loop continues the start-up.
"""

import asyncio
import atexit
import contextlib
import faulthandler
import gc
import os
import queue
import threading
from collections.abc import Callable
from typing import Any

from quire.core.config.resolved import EngineConfig
from quire.core.errors import ConfigError, EngineError
from quire.core.logging import get_logger
from quire.core.wire.kv_groups import shares_prefixes
from quire.core.wire.protocol import EngineReady, StepPlan, StepResult, WorkerAnswer, WorkerCall, WorkerReady
from quire.core.wire.rank import Rank
from quire.executor.processes.cores import share_out_cores
from quire.executor.processes.pending_calls import PendingCalls
from quire.executor.processes.result_inbox import ResultInbox
from quire.executor.processes.step_loop import StepLoop, StepWorker
from quire.executor.processes.worker_builder import prepare_worker

logger = get_logger(__name__)

DEFAULT_FACTORY = "quire.executor.processes.worker_factory:create_worker"
CLOSE_GRACE_SECONDS = 5.0


class InboxClosed(Exception):
    """The inbox gets no more plans."""


class PlanInbox:
    """Plans and calls for the worker's thread."""

    def __init__(self) -> None:
        self._plans: queue.SimpleQueue[StepPlan | WorkerCall | None] = queue.SimpleQueue()

    def put(self, plan: StepPlan | WorkerCall) -> None:
        """Adds a message at the end."""
        self._plans.put(plan)

    def close(self) -> None:
        """Drops pending plans, and wakes the thread."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._plans.get_nowait()
        self._plans.put(None)

    def wait(self) -> StepPlan | WorkerCall:
        return self._opened(self._plans.get())

    def poll(self) -> StepPlan | WorkerCall | None:
        try:
            return self._opened(self._plans.get_nowait())
        except queue.Empty:
            return None

    @staticmethod
    def _opened(plan: StepPlan | WorkerCall | None) -> StepPlan | WorkerCall:
        if plan is None:
            raise InboxClosed
        return plan


class UniProcExecutor:
    """Runs one worker. Implements `quire.core.engine.Executor`.

    Args:
        factory: qualified name of a function that builds the worker from (config, rank, init_method).
    """

    waits_for = None

    def __init__(self, config: EngineConfig, *, factory: str = DEFAULT_FACTORY) -> None:
        self.depth = 2 if config.limits.async_scheduling else 1
        self._config = config
        self._factory = factory
        self._inbox = PlanInbox()
        self._results = ResultInbox()
        self._calls = PendingCalls(1)
        self._thread: threading.Thread | None = None
        self._build: Callable[[], Any] | None = None  # builds the worker, once it is prepared
        self._ended = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def pids(self) -> list[int]:
        return [os.getpid()]

    @property
    def stopped(self) -> list[str]:
        return []  # the worker cannot be stopped by itself

    async def prepare(self) -> None:
        """Imports all that the worker needs."""
        self._build = await asyncio.to_thread(self._prepare_worker)

    async def start(self) -> EngineReady:
        """Loads the model. Raises ConfigError (ModelLoadError) when a restart would fail the same way."""
        self._loop = asyncio.get_running_loop()
        started: asyncio.Future[WorkerReady] = self._loop.create_future()
        # A daemon thread, because a hung step must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, args=(started,), name="worker", daemon=True)
        self._thread.start()
        ready = await started
        return EngineReady(
            num_pages=ready.num_pages,
            block_size=self._config.limits.block_size,
            max_model_len=ready.max_model_len,
            weights_bytes=ready.weights_bytes,
            kv_cache_bytes=ready.kv_cache_bytes,
            device_name=ready.device_name,
            kv_groups=ready.kv_groups,
            caches_prefixes=self._config.limits.enable_prefix_caching
            and shares_prefixes(ready.kv_groups, whole_prompts=ready.whole_prompts),
            whole_prompts=ready.whole_prompts,
            reads=ready.reads,
            media_spans=ready.media_spans,
            media_rows=ready.media_rows,
        )

    def submit(self, plan: StepPlan) -> None:
        """Queues a plan; plans run in order."""
        self._inbox.put(plan)

    async def next_result(self) -> StepResult:
        """Returns the oldest result that has not been taken. Raises EngineError when there will be none."""
        return await self._results.get()

    def when_failed(self, call: Callable[[], None]) -> None:
        self._results.when_failed(call)

    async def call(self, name: str, payload: bytes) -> list[bytes]:
        """Returns the worker's answer to a call, in a list. Raises EngineError if the call fails."""
        call, answer = self._calls.open(name, payload)
        self._inbox.put(call)
        return await answer

    async def close(self, *, hung: bool) -> None:
        """Ends the thread after its current step, if that ends soon. Idempotent.

        Args:
            hung: write the stacks of all threads of this process to stderr.
        """
        self._fail(EngineError("The executor was closed before this step was done."))
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._inbox.close()
        if hung:
            faulthandler.dump_traceback()
            return  # the thread would not notice; it ends with the process
        try:
            async with asyncio.timeout(CLOSE_GRACE_SECONDS):
                await self._ended.wait()
        except TimeoutError:
            logger.warning("The worker is still busy after %.0f s and is left behind.", CLOSE_GRACE_SECONDS)
        else:
            thread.join()  # it ends without another step

    # ---------------------------------------------------------------------------------------------- worker's thread

    def _run(self, started: asyncio.Future[WorkerReady]) -> None:
        try:
            self._load_and_step(started)
        finally:
            self._post(self._ended.set)

    def _load_and_step(self, started: asyncio.Future[WorkerReady]) -> None:
        try:
            build = self._build or self._prepare_worker()
            gc.freeze()  # imported objects stay: the collection at the end of the start need not visit them
            atexit.register(gc.unfreeze)  # see `tune_garbage_collector`
            gc.enable()  # the worker may wait for those of other engines for hours
            worker = build()
            ready = worker.load()
            worker.allocate(ready.num_pages, ready.max_model_len)
        except ConfigError as error:
            self._post(_set_exception, started, error)
            return
        except Exception as error:  # any failure ends this thread, and the engine must learn of it
            logger.exception("the worker failed to start")
            text = f"The worker failed to start: {type(error).__name__}: {error}"
            self._post(_set_exception, started, EngineError(text))
            return
        self._post(_set_result, started, ready)
        self._step(worker)

    def _prepare_worker(self) -> Callable[[], Any]:
        """The function that builds the worker. Importing torch takes seconds that the event loop can use."""
        share_out_cores(os.environ, self._config.place.num_local)
        return prepare_worker(self._factory, self._config, Rank(data=self._config.place.data), "")

    def _step(self, worker: StepWorker[Any]) -> None:
        loop = StepLoop(worker, self._inbox, self._report, self._answer)
        try:
            loop.run()
        except InboxClosed:
            return
        except Exception as error:  # the worker's state is undefined: no later step may run
            logger.exception("the worker failed in step %d", loop.step_id)
            text = f"The worker failed in step {loop.step_id}: {type(error).__name__}: {error}"
            self._post(self._fail, EngineError(text))

    def _report(self, result: StepResult) -> None:
        self._post(self._results.put, result)

    def _answer(self, answer: WorkerAnswer) -> None:
        self._post(self._calls.add, answer)

    def _fail(self, error: EngineError) -> None:
        self._results.fail(error)
        self._calls.fail(error)

    def _post(self, callback: Callable[..., None], *args: Any) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has ended without `close`: there is no receiver
            self._loop.call_soon_threadsafe(callback, *args)


def _set_result(future: asyncio.Future[WorkerReady], ready: WorkerReady) -> None:
    if not future.done():
        future.set_result(ready)


def _set_exception(future: asyncio.Future[WorkerReady], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
