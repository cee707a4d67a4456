"""`mp`: one worker process for each rank; plans go out through one ring, results come back through one ring a rank.

Everything happens on the engine's event loop: it watches the rings' eventfds and the processes' pidfds, so there is
no thread, no lock and no polling. This file must not import torch: only the workers need it, and they start at once.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections import deque

import msgspec
from msgspec.structs import replace

from quire.core import envs
from quire.core.config.resolved import EngineConfig
from quire.core.errors import ConfigError, EngineError, ModelLoadError
from quire.core.logging import get_logger
from quire.core.wire.kv_groups import KVGroupSpec
from quire.core.wire.protocol import (
    AllocateCache,
    EngineReady,
    StepPlan,
    StepResult,
    WorkerAnswer,
    WorkerFailed,
    WorkerOutput,
    WorkerReady,
    encoder,
)
from quire.core.wire.rank import Rank
from quire.executor.processes.cores import share_out_cores
from quire.executor.processes.pending_calls import PendingCalls
from quire.executor.processes.result_inbox import ResultInbox
from quire.executor.processes.ring import RingReader, RingWriter
from quire.executor.processes.ring_memory import RingHandle, create_ring
from quire.executor.processes.slot_grammars import SlotGrammars
from quire.executor.processes.worker_process import WorkerAssignment

logger = get_logger(__name__)

DEFAULT_FACTORY = "quire.executor.processes.worker_factory:create_worker"
TERMINATE_GRACE_SECONDS = 5.0


class _Link:
    """The executor's end of one worker: process, pidfd, result ring and the capacity that it last reported."""

    def __init__(self, rank: Rank, process: subprocess.Popen[bytes], results: RingHandle) -> None:
        self.rank = rank
        self.process = process
        self.pidfd = os.pidfd_open(process.pid)
        self.results_handle = results
        self.results = RingReader(results, 0)
        self.ready: asyncio.Future[WorkerReady] = asyncio.get_running_loop().create_future()
        self.exited = asyncio.Event()

    def describe_exit(self) -> str:
        code = self.process.returncode
        name = f"Worker {self.rank} (pid {self.process.pid})"
        if code >= 0:
            return f"{name} ended with exit code {code}; its own log lines say why."
        killer = signal.Signals(-code).name
        hint = " Perhaps the host ran out of memory: see dmesg." if killer == "SIGKILL" else ""
        return f"{name} was killed by {killer}.{hint}"

    def close(self) -> None:
        self.results.close()
        self.results_handle.close()
        os.close(self.pidfd)


class MultiProcExecutor:
    """Runs the workers of `config.layout`. See `quire.core.engine.Executor`.

    Args:
        factory: qualified name of a function that builds a worker in its process from (config, rank, init_method).
    """

    def __init__(self, config: EngineConfig, *, factory: str = DEFAULT_FACTORY) -> None:
        self.depth = 2 if config.limits.async_scheduling else 1
        self._config = config
        self._factory = factory
        self._encoder = encoder()
        self._decoder: msgspec.msgpack.Decoder[WorkerOutput] = msgspec.msgpack.Decoder(WorkerOutput)
        self._grammars = SlotGrammars()
        self._results = ResultInbox()
        self._calls = PendingCalls(config.layout.num_workers)
        self._unsent: deque[bytes] = deque()  # plans that wait for room in the ring
        self._links: list[_Link] = []
        self._plans_handle: RingHandle | None = None
        self._plans: RingWriter | None = None
        self._rendezvous_fd: int | None = None
        self._failure: EngineError | ConfigError | None = None
        self._closed = False

    async def start(self) -> EngineReady:
        """Starts the workers and loads the model on all of them.

        Raises:
            ModelLoadError: the checkpoint or the options are at fault; a restart would fail the same way.
            EngineError: a worker died.
        """
        self._spawn_all()
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
        )

    def submit(self, plan: StepPlan) -> None:
        """Sends a plan to all workers. Never blocks: while the ring is full, plans wait in a queue."""
        self._send(self._encoder.encode(self._grammars.without_known(plan)))

    async def next_result(self) -> StepResult:
        """The oldest result that has not been taken. Raises EngineError when there will be none."""
        return await self._results.get()

    async def call(self, name: str, payload: bytes) -> list[bytes]:
        """Every worker's answer to a call, by rank. Raises EngineError if a worker fails at it."""
        call, answer = self._calls.open(name, payload)
        self._send(self._encoder.encode(call))
        return await answer

    async def close(self, *, hung: bool) -> None:
        """Ends the workers and frees their rings. Idempotent.

        Args:
            hung: have each worker write its stack to stderr.
        """
        if self._closed:
            return
        self._closed = True
        if hung:
            await self._dump_stacks()
        closed = EngineError("The executor was closed before this step was done.")
        self._results.fail(closed)
        self._calls.fail(closed)
        try:
            if self._plans is not None:
                self._plans.close()
            self._signal_all(signal.SIGTERM)
            await self._all_exited()
        finally:
            self._signal_all(signal.SIGKILL)
            await self._all_exited()
            self._free()

    # --------------------------------------------------------------------------------------------------- processes

    def _spawn_all(self) -> None:
        ranks = self._config.layout.ranks()
        self._rendezvous_fd = os.memfd_create("quire-rendezvous")  # like the rings, leaves no file behind
        self._plans_handle = create_ring(len(ranks))
        interval = envs.read_float("RINGBUFFER_WARNING_INTERVAL")
        self._plans = RingWriter(self._plans_handle, name="plan", warning_interval_seconds=interval)
        environment = dict(os.environ)
        share_out_cores(environment, len(ranks))
        for reader, rank in enumerate(ranks):
            self._links.append(self._spawn(rank, reader, self._plans_handle, self._rendezvous_fd, environment))

    def _spawn(
        self, rank: Rank, reader: int, plans: RingHandle, rendezvous_fd: int, environment: dict[str, str]
    ) -> _Link:
        results = create_ring(1)
        assignment = WorkerAssignment(
            config=self._config,
            rank=rank,
            parent_pid=os.getpid(),
            factory=self._factory,
            init_method=f"file:///proc/self/fd/{rendezvous_fd}",
            plans=plans,
            reader=reader,
            results=results,
        )
        # A memfd and not a pipe: writing it never waits for the child. A command and not a fork or multiprocessing:
        # nothing of this process leaks into the child, and a user's script needs no `if __name__ == "__main__"`.
        # -P: files in the folder that the user happens to be in are not modules.
        with open(os.memfd_create("quire-assignment"), "wb", buffering=0) as file:
            file.write(self._encoder.encode(assignment))
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "quire.executor.processes.worker_process", str(file.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[file.fileno(), rendezvous_fd, *assignment.fds],
                env=environment,
            )
        link = _Link(rank, process, results)
        loop = asyncio.get_running_loop()
        loop.add_reader(link.results.fileno(), self._on_messages, link)
        loop.add_reader(link.pidfd, self._on_exit, link)
        return link

    def _on_exit(self, link: _Link) -> None:
        link.process.wait()  # returns at once: the pidfd is readable when the process has ended
        asyncio.get_running_loop().remove_reader(link.pidfd)
        link.exited.set()
        self._on_messages(link)  # its last message may explain its end better than the exit code
        self._fail(EngineError(link.describe_exit()))

    def _signal_all(self, number: signal.Signals) -> None:
        for link in self._links:
            if not link.exited.is_set():
                link.process.send_signal(number)

    async def _dump_stacks(self) -> None:
        for link in self._links:
            if not link.exited.is_set():
                link.process.send_signal(signal.SIGUSR1)
                await asyncio.sleep(0.1)  # one after the other, or their lines mix

    async def _all_exited(self) -> None:
        """Returns when every worker has ended, or after the grace period."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TERMINATE_GRACE_SECONDS):
                for link in self._links:
                    await link.exited.wait()

    def _free(self) -> None:
        loop = asyncio.get_running_loop()
        for link in self._links:
            loop.remove_reader(link.results.fileno())
            loop.remove_reader(link.pidfd)
            link.close()
        self._links.clear()
        if self._plans_handle is not None:
            loop.remove_reader(self._plans_handle.space_fd)
            self._plans_handle.close()
        if self._rendezvous_fd is not None:
            os.close(self._rendezvous_fd)

    # ---------------------------------------------------------------------------------------------------- messages

    def _send(self, message: bytes) -> None:
        self._unsent.append(message)
        if len(self._unsent) == 1:
            self._flush()

    def _flush(self) -> None:
        """Writes the plans that fit; the event loop calls this again when a worker has freed a slot."""
        if self._closed or self._failure is not None:
            self._unsent.clear()
            return
        assert self._plans is not None, "start() comes first"
        while self._unsent and self._plans.try_write(self._unsent[0]):
            self._unsent.popleft()
        if self._unsent:
            asyncio.get_running_loop().add_reader(self._plans.fileno(), self._on_space)

    def _on_space(self) -> None:
        assert self._plans is not None
        self._plans.clear()
        self._flush()
        if not self._unsent:
            asyncio.get_running_loop().remove_reader(self._plans.fileno())

    def _on_messages(self, link: _Link) -> None:
        for payload in link.results.drain():
            match self._decoder.decode(payload):
                case StepResult() as result:
                    self._results.put(result)
                case WorkerAnswer() as answer:
                    self._calls.add(answer)
                case WorkerReady() as ready:
                    if not link.ready.done():
                        link.ready.set_result(ready)
                case WorkerFailed() as failed:
                    self._on_failed(failed)

    def _on_failed(self, failed: WorkerFailed) -> None:
        if failed.fatal:
            self._fail(ModelLoadError(failed.message))
        else:
            self._fail(EngineError(f"Worker {failed.rank} failed: {failed.message}"))

    def _fail(self, error: EngineError | ConfigError) -> None:
        """Fails everything that waits with the first error; the engine then closes this executor."""
        if self._failure is None:
            self._failure = error
        for link in self._links:
            if not link.ready.done():
                link.ready.set_exception(error)
                link.ready.exception()  # marks it as seen: `start` raises the first only
        failed = error if isinstance(error, EngineError) else EngineError(str(error))
        self._results.fail(failed)
        self._calls.fail(failed)

    async def _all_ready(self) -> list[WorkerReady]:
        loaded = await asyncio.gather(*(link.ready for link in self._links))
        for link in self._links:
            link.ready = asyncio.get_running_loop().create_future()
        if self._failure is not None:  # it came while the answers were collected
            raise self._failure
        return loaded


def _agreed_groups(loaded: list[WorkerReady]) -> list[KVGroupSpec]:
    """The KV groups that all workers declare, with the page bytes of the first: block tables are the same for all.

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
    """The groups without the bytes of pages, on which nothing but the number of a snapshot's pages depends."""
    return [group if group.interval else replace(group, page_bytes=0) for group in ready.kv_groups]
