"""The workers of one engine on one host: their interface to an executor, and its implementation for this host.

An executor sends each host the messages for its workers and receives theirs, all as bytes. So a host may as well be
another machine. Everything happens on one event loop: it watches the rings' eventfds and the processes' pidfds, so
there is no thread, no lock and no polling. This file must not import torch: only the workers need it, and they start at
once.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from quire.core import envs
from quire.core.cluster.addresses import interface_of
from quire.core.config.resolved import EngineConfig
from quire.core.errors import EngineError, EngineKilledError, PeerLostError
from quire.core.logging import get_logger
from quire.core.process_activity import is_stopped
from quire.core.process_ends import EndOfProcess
from quire.core.processes import is_ending
from quire.core.wire.protocol import encoder
from quire.core.wire.rank import Rank
from quire.core.wire.rendezvous import Rendezvous
from quire.executor.processes.cores import share_out_cores
from quire.executor.processes.ring import RingReader, RingWriter
from quire.executor.processes.ring_memory import RingHandle, create_ring
from quire.executor.processes.worker_process import LOST_PEER_EXIT_CODE, WorkerAssignment

logger = get_logger(__name__)

TERMINATE_GRACE_SECONDS = 5.0


class HostListener(Protocol):
    """Receives the messages of a host's workers."""

    def on_output(self, message: bytes) -> None:
        """A worker has sent a `WorkerOutput`."""

    def on_lost(self, error: EngineError) -> None:
        """Reports that a worker has ended, so none of them can continue. Its last messages came before."""


class WorkerHost(Protocol):
    """The workers of one engine on one host."""

    def start(self) -> None:
        """Starts the workers, which report when they are ready. Call `close` even if this raises."""

    def send(self, message: bytes) -> None:
        """Sends a `WorkerInput` to each worker, the same to all, in order. Never blocks."""

    def share(self, path: str) -> None:
        """Makes a file of this process's host available to the workers. Call before the message that names its path."""

    @property
    def pids(self) -> list[int]:
        """The workers' processes, as far as they are on the host of this process."""

    @property
    def stopped(self) -> list[str]:
        """The workers of `pids` that a signal has stopped, by name."""

    async def await_exits(self) -> None:
        """Returns when the listener has received everything from workers that are already ending, including their ends.

        A worker may find a peer's connection closed before the peer's end is known here.
        """

    async def close(self, *, hung: bool) -> None:
        """Ends the workers and frees their resources. Idempotent.

        Args:
            hung: makes each worker write its stack to stderr.
        """


class _Link:
    """This end of one worker: its process, pidfd and result ring."""

    def __init__(self, rank: Rank, process: subprocess.Popen[bytes], results: RingHandle, ending: EndOfProcess) -> None:
        self.rank = rank
        self._ending = ending
        self.process = process
        self.pidfd = os.pidfd_open(process.pid)
        self.results_handle = results
        self.results = RingReader(results, 0)
        self.exited = asyncio.Event()

    def __str__(self) -> str:
        return f"Worker {self.rank} (pid {self.process.pid})"

    def exit_error(self) -> EngineError:
        code = self.process.returncode
        if code == LOST_PEER_EXIT_CODE:
            return PeerLostError(f"{self} ended because another worker has.")
        if code >= 0:
            return EngineError(f"{self} ended with exit code {code}; its own log lines say why.")
        message = f"{self} was killed by {signal.Signals(-code).name}.{self._ending.hint(code)}"
        return EngineKilledError(message) if self._ending.is_from_outside(code) else EngineError(message)

    @property
    def is_ending(self) -> bool:
        """Returns True if the process is about to end."""
        return not self.exited.is_set() and is_ending(self.process.pid)

    def close(self) -> None:
        self.results.close()
        self.results_handle.close()
        os.close(self.pidfd)


class LocalHost:
    """Workers on this host: plans go out through one ring, results come back through one ring a worker.

    Args:
        config: the same for all ranks.
        ranks: of the workers here.
        factory: qualified name of a function that builds a worker in its process from (config, rank, init_method).
        rendezvous: the rendezvous of all ranks of the engine.
        listener: receives the workers' messages.

    Raises:
        ConfigError: this host does not have the rendezvous's address.
    """

    def __init__(
        self,
        config: EngineConfig,
        ranks: Sequence[Rank],
        factory: str,
        rendezvous: Rendezvous,
        listener: HostListener,
    ) -> None:
        self._config = config
        self._factory = factory
        self._rendezvous = rendezvous
        self._listener = listener
        self._encoder = encoder()
        self._unsent: deque[bytes] = deque()  # messages waiting for room in the ring
        self._links: list[_Link] = []
        self._is_lost = False
        self._closed = False
        self._ranks = ranks
        self._environment = {**os.environ, **_interface_variables(rendezvous.address)}
        share_out_cores(self._environment, len(ranks) * config.place.num_local)
        self._plans_handle = create_ring(len(ranks))
        interval = envs.read_float("RINGBUFFER_WARNING_INTERVAL")
        self._plans = RingWriter(self._plans_handle, name="plan", warning_interval_seconds=interval)

    def start(self) -> None:
        """Starts the workers, which report when they are ready. Call `close` even if this raises."""
        for reader, rank in enumerate(self._ranks):
            self._links.append(self._spawn(rank, reader))

    def send(self, message: bytes) -> None:
        """Sends through the ring. While it is full, messages wait in a queue."""
        self._unsent.append(message)
        if len(self._unsent) == 1:
            self._flush()

    def share(self, path: str) -> None:
        """Does nothing: workers on the same host open the path themselves."""

    @property
    def pids(self) -> list[int]:
        return [link.process.pid for link in self._links if not link.exited.is_set()]

    @property
    def stopped(self) -> list[str]:
        return [str(link) for link in self._links if not link.exited.is_set() and is_stopped(link.process.pid)]

    async def await_exits(self) -> None:
        for link in self._links:
            self._on_messages(link)
        for link in [link for link in self._links if link.is_ending]:
            await link.exited.wait()

    async def close(self, *, hung: bool) -> None:
        if self._closed:
            return
        self._closed = True
        if hung:
            await self._dump_stacks()
        try:
            self._plans.close()
            if not hung:  # one that hangs would not notice
                self._signal_all(signal.SIGTERM)
                await self._all_exited()
        finally:
            self._signal_all(signal.SIGKILL)
            await self._all_exited()
            self._warn_survivors()
            self._free()

    # --------------------------------------------------------------------------------------------------- processes

    def _spawn(self, rank: Rank, reader: int) -> _Link:
        results = create_ring(1)
        assignment = WorkerAssignment(
            config=self._config,
            rank=rank,
            parent_pid=os.getpid(),
            factory=self._factory,
            init_method=self._rendezvous.init_method,
            plans=self._plans_handle,
            reader=reader,
            results=results,
            num_local=len(self._ranks) * self._config.place.num_local,
        )
        # A memfd instead of a pipe: writing never waits for the child. A command instead of a fork or multiprocessing:
        # nothing of this process leaks into the child, and a user's script needs no `if __name__ == "__main__"`.
        # -P: files in the current folder are not modules.
        ending = EndOfProcess()
        with open(os.memfd_create("quire-assignment"), "wb", buffering=0) as file:
            file.write(self._encoder.encode(assignment))
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "quire.executor.processes.worker_process", str(file.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[file.fileno(), *self._rendezvous.fds, *assignment.fds],
                env=self._environment,
            )
        link = _Link(rank, process, results, ending)
        loop = asyncio.get_running_loop()
        loop.add_reader(link.results.fileno(), self._on_messages, link)
        loop.add_reader(link.pidfd, self._on_exit, link)
        return link

    def _on_exit(self, link: _Link) -> None:
        link.process.wait()  # returns at once: the pidfd is readable once the process has ended
        asyncio.get_running_loop().remove_reader(link.pidfd)
        link.exited.set()
        self._on_messages(link)  # its last message may explain its end better than the exit code
        self._is_lost = True
        self._listener.on_lost(link.exit_error())

    def _on_messages(self, link: _Link) -> None:
        for message in link.results.drain():
            self._listener.on_output(message)

    def _signal_all(self, number: signal.Signals) -> None:
        for link in self._links:
            if not link.exited.is_set():
                link.process.send_signal(number)

    async def _dump_stacks(self) -> None:
        for link in self._links:
            if not link.exited.is_set():
                link.process.send_signal(signal.SIGUSR1)
                await asyncio.sleep(0.05)  # one after the other, or their lines mix

    async def _all_exited(self) -> None:
        """Returns when every worker has ended, or after the grace period."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TERMINATE_GRACE_SECONDS):
                for link in self._links:
                    await link.exited.wait()

    def _warn_survivors(self) -> None:
        living = [f"{link.rank} (pid {link.process.pid})" for link in self._links if not link.exited.is_set()]
        if living:
            logger.warning("workers that were killed have not ended, and hold their devices: %s", ", ".join(living))

    def _free(self) -> None:
        loop = asyncio.get_running_loop()
        for link in self._links:
            loop.remove_reader(link.results.fileno())
            loop.remove_reader(link.pidfd)
            link.close()
        self._links.clear()
        loop.remove_reader(self._plans_handle.space_fd)
        self._plans_handle.close()

    # -------------------------------------------------------------------------------------------------------- plans

    def _flush(self) -> None:
        """Writes the messages that fit; the event loop calls this again when a worker has freed a slot."""
        if self._closed or self._is_lost:
            self._unsent.clear()
            return
        while self._unsent and self._plans.try_write(self._unsent[0]):
            self._unsent.popleft()
        if self._unsent:
            asyncio.get_running_loop().add_reader(self._plans.fileno(), self._on_space)

    def _on_space(self) -> None:
        self._plans.clear()
        self._flush()
        if not self._unsent:
            asyncio.get_running_loop().remove_reader(self._plans.fileno())


def _interface_variables(address: str | None) -> dict[str, str]:
    """Returns variables that restrict gloo and NCCL to the network interface of `address`."""
    if address is None:
        return {}
    interface = interface_of(address)
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}  # NCCL: else a prefix
