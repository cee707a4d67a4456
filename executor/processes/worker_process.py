"""Main of a worker process: `python -m quire.executor.processes.worker_process FD`, started by `worker_host`.

FD is a memfd with a `WorkerAssignment`. The process loads its shard, reports its capacity, allocates as much as all
ranks can, and answers plans until the plan ring closes, its parent dies or a step fails. It decides nothing.
"""

import atexit
import ctypes
import faulthandler
import gc
import os
import signal
import sys
import threading

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from quire.core import logging
from quire.core.config.resolved import EngineConfig
from quire.core.errors import ConfigError, NoMemoryError
from quire.core.processes import leave
from quire.core.wire.protocol import (
    AllocateCache,
    FailureCause,
    FileCopy,
    LoadModel,
    StepPlan,
    StepResult,
    WorkerCall,
    WorkerFailed,
    WorkerInput,
    WorkerReady,
    encoder,
)
from quire.core.wire.rank import Rank
from quire.executor.parallel.lost_peer import lost_peer
from quire.executor.processes.cores import usable_cores
from quire.executor.processes.lockstep_plans import LockstepPlans
from quire.executor.processes.ring import RingClosed, RingReader, RingWriter
from quire.executor.processes.ring_memory import RingHandle
from quire.executor.processes.slot_grammars import SlotGrammars
from quire.executor.processes.step_loop import StepLoop
from quire.executor.processes.worker_builder import prepare_worker

logger = logging.get_logger(__name__)

LOST_PEER_EXIT_CODE = 3
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_SPIN_SECONDS = 50e-6


class WorkerAssignment(Struct, frozen=True, array_like=True):
    """A worker process's parameters at its start. The process reads `plans` as reader number `reader`."""

    config: EngineConfig
    rank: Rank
    parent_pid: int
    factory: str  # qualified name, called with (config, rank, init_method)
    init_method: str  # the rendezvous of the ranks; see `RankGroups.join`
    plans: RingHandle
    reader: int
    results: RingHandle
    num_local: int  # workers on this host, of all its engines

    @property
    def fds(self) -> list[int]:
        """Descriptors that the process must inherit."""
        return [*self.plans.fds, *self.results.fds]


class ParentGone(Exception):
    """The engine has died, so there is no receiver of answers."""


class WorkerProcess:
    """One rank: its two rings and its worker."""

    def __init__(self, assignment: WorkerAssignment) -> None:
        self._assignment = assignment
        spare_cores = usable_cores() - assignment.num_local
        spin_seconds = _SPIN_SECONDS if spare_cores > 1 else 0.0
        self._plans = RingReader(assignment.plans, assignment.reader, spin_seconds=spin_seconds)
        self._results = RingWriter(assignment.results, name=f"rank {assignment.rank} result")
        self._decoder: msgspec.msgpack.Decoder[WorkerInput] = msgspec.msgpack.Decoder(WorkerInput)
        self._encoder = encoder()
        self._sending = threading.Lock()
        self._grammars = SlotGrammars()
        self._copies: dict[str, str] = {}  # copies of another host's files, by their paths there

    def run(self) -> int:
        """Works until the rings close or a step fails. Returns the process's exit code."""
        try:
            self._work()
        except (RingClosed, ParentGone):
            return 0
        except ConfigError as error:
            if self._assignment.config.is_led_from_afar:
                logger.error("%s", error)
            cause: FailureCause = "memory" if isinstance(error, NoMemoryError) else "setting"
            self._send(WorkerFailed(self._assignment.rank, str(error), cause))
        except Exception as error:  # any failure ends this process, and the engine must learn of it
            if (reason := lost_peer(error)) is not None:
                what = f"a worker that it works with has ended, or cannot be reached ({reason})."
                self._send(WorkerFailed(self._assignment.rank, what, "peer"))
                return LOST_PEER_EXIT_CODE
            logger.exception("the worker failed")
            self._send(WorkerFailed(self._assignment.rank, f"{type(error).__name__}: {error}", "other"))
        return 1

    def _work(self) -> None:
        assignment = self._assignment
        gc.disable()  # during imports, which make a million objects and hardly a cycle
        build = prepare_worker(
            assignment.factory, assignment.config, assignment.rank, assignment.init_method
        )  # fmt: skip
        gc.freeze()  # imported objects stay: the collection at the end of the start need not visit them
        atexit.register(gc.unfreeze)  # see `tune_garbage_collector`
        gc.enable()
        begin = self._receive()  # a spare engine's worker waits here
        assert isinstance(begin, LoadModel), begin
        worker = build()
        ready: WorkerReady = worker.load()
        self._send(ready)
        agreed = self._receive()
        assert isinstance(agreed, AllocateCache), agreed
        worker.allocate(agreed.num_pages, agreed.max_model_len)
        self._send(ready)
        gc.collect()
        gc.freeze()  # a full collection need not visit the model again
        plans = self if worker.peers is None else LockstepPlans(self, worker.peers, worker.run_dummy_step)
        StepLoop(worker, plans, self._report, self._send).run()

    def wait(self) -> StepPlan | WorkerCall:
        while (message := self._complete(self._receive())) is None:
            pass
        return message

    def poll(self) -> StepPlan | WorkerCall | None:
        message = self._plans.try_read()
        if message is None:
            return None
        return self._complete(self._decoder.decode(message))

    def sleep(self) -> None:
        self._plans.sleep(self._check_parent)

    def wake(self) -> None:
        self._plans.wake()

    def _complete(self, message: WorkerInput) -> StepPlan | WorkerCall | None:
        """Returns the message for the loop; None if it is not for the loop."""
        match message:
            case StepPlan() as plan:
                self._grammars.complete(plan)
                self._use_copies(plan)
                return plan
            case WorkerCall() as call:
                return call
            case FileCopy(path, copy):
                self._copies[path] = copy
                return None
        raise AssertionError(message)

    def _use_copies(self, plan: StepPlan) -> None:
        if not self._copies:
            return
        for new in plan.admitted:
            if new.grammar is not None:
                path = new.grammar.vocabulary_path
                new.grammar = replace(new.grammar, vocabulary_path=self._copies.get(path, path))

    def _report(self, result: StepResult) -> None:
        if self._assignment.config.layout.reports(self._assignment.rank):
            self._send(result)

    def _receive(self) -> WorkerInput:
        return self._decoder.decode(self._plans.read(check=self._check_parent))

    def _send(self, message: Struct) -> None:
        with self._sending:  # answers to some calls come from other threads
            self._results.write(self._encoder.encode(message), check=self._check_parent)

    def _check_parent(self) -> None:
        # The kernel signals the parent's death if prctl exists and took effect; this check covers other cases.
        if os.getppid() != self._assignment.parent_pid:
            raise ParentGone


def _follow_parent(parent_pid: int, rank: Rank) -> None:
    """Makes the kernel kill this process when the parent's thread that started it ends, even by SIGKILL."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    libc.prctl(_PR_SET_NAME, f"quire-{rank}".encode())
    if os.getppid() != parent_pid:  # the parent died before the kernel learned of it
        sys.exit(0)


def main(fd: int) -> int:
    """Reads the assignment from `fd` and works."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent decides
    with open(fd, "rb") as file:
        file.seek(0)
        assignment = msgspec.msgpack.decode(file.read(), type=WorkerAssignment)
    _follow_parent(assignment.parent_pid, assignment.rank)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # the executor asks a hung worker for its stack
    hints = assignment.rank.is_first and assignment.config.logs_hints
    logging.configure(f"worker-{assignment.rank}", assignment.config.logging, hints=hints)
    return WorkerProcess(assignment).run()


if __name__ == "__main__":
    leave(main(int(sys.argv[1])))
