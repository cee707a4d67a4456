"""Main of an engine process: `python -m quire.frontend.launch.engine_main FD`, started by `EngineLauncher`.

FD is a memfd with an `EngineStart`. The standard input is a pipe that closes when the parent ends. A spare engine
imports everything, and loads its model when it reads a `turn` there.
"""

import asyncio
import errno
import faulthandler
import gc
import logging
import os
import select
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import uvloop
from msgspec import Struct

from quire.core.cluster.messages import CoordinatorStart
from quire.core.config.resolved import EngineConfig
from quire.core.flight.recorder import NO_RECORDER, FlightRecorder, Recorder
from quire.core.flight.segments import FileSegments, MemorySegments
from quire.core.logging import configure
from quire.core.wire.channel import CurveKeys
from quire.core.wire.rendezvous import Rendezvous
from quire.executor import torch_library

if TYPE_CHECKING:
    from quire.core.engine.engine import Executor


def turn(follows: int | None) -> bytes:
    """The line that tells a spare engine that its turn has come, and which process group's end to wait for."""
    return b"%d\n" % (follows or 0)


class ReplayStart(Struct, array_like=True):
    """A recorded schedule to run instead of serving."""

    files: list[str]  # of one recording
    vocabularies: dict[str, str]  # paths here, by paths in the recording


class EngineStart(Struct, array_like=True):
    """The start message of an engine process."""

    config: EngineConfig
    address: str
    keys: CurveKeys | None
    parent: int  # its process id
    worker_factory: str | None = None  # qualified name of a replacement for the real worker
    cluster: CoordinatorStart | None = None  # where other nodes join
    rendezvous: Rendezvous | None = None  # with the workers of other engines
    listen_fd: int | None = None  # of a socket that listens at the address already
    flight: tuple[int, int] | None = None  # descriptors of memory for a flight recorder
    replay: ReplayStart | None = None
    is_spare: bool = False
    follows: int | None = None  # the process group of the engine before


def main(fd: int) -> None:
    """Reads an `EngineStart` from `fd`, and runs that engine until its parent or a signal ends it."""
    gc.disable()  # during imports, which make a million objects and hardly a cycle
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # the parent asks a hung engine for its stacks
    with open(fd, "rb") as file:
        file.seek(0)
        start = msgspec.msgpack.decode(file.read(), type=EngineStart)
    configure(start.config.process_name, start.config.logging, hints=start.config.logs_hints)
    if start.config.executor == "uni" and start.worker_factory is None:
        torch_library.load_ahead()
    code = uvloop.run(_run_engine(start))
    if start.address.startswith("ipc://") and _outlives(start.parent):  # a dead parent cannot remove its folder
        shutil.rmtree(os.path.dirname(start.address.removeprefix("ipc://")), ignore_errors=True)
    _leave(code)


def _leave(code: int) -> NoReturn:
    """Ends the process, at once if a worker's thread still runs. The interpreter's own exit stops threads where they
    are; a thread inside C++ at that time, as during torch's import, would abort the process."""
    if threading.active_count() > 1:
        logging.shutdown()
        os._exit(code)
    sys.exit(code)  # and not sooner: ZeroMQ's thread may still be sending why the engine ends


def _outlives(parent: int) -> bool:
    """Returns True if the parent is gone. A dying parent closes our standard input a moment before `os.getppid`
    changes."""
    deadline = time.monotonic() + 1
    [is_closed, _, _] = select.select([sys.stdin], [], [], 0)
    while is_closed and os.getppid() == parent and time.monotonic() < deadline:
        time.sleep(0.01)
    return os.getppid() != parent


async def _run_engine(start: EngineStart) -> int:
    import zmq

    from quire.core.engine.process import EngineProcess

    if start.config.executor == "uni":
        from quire.executor.processes.uniproc import UniProcExecutor as Executor
    else:
        from quire.executor.processes.multiproc import MultiProcExecutor as Executor  # type: ignore[assignment]
    options: dict[str, Any] = {"factory": start.worker_factory} if start.worker_factory else {}
    if start.rendezvous is not None:
        from quire.executor.processes.placement import OneHost

        options["placement"] = OneHost(start.config, start.rendezvous)
    if start.cluster is not None:
        from quire.executor.processes.placement import SeveralHosts

        options["placement"] = SeveralHosts(start.config, start.cluster)
    if start.config.executor != "uni":  # which imports the worker later, and enables collections itself
        gc.enable()
    executor = Executor(start.config, **options)
    if start.replay is not None:
        return await _replay(start.replay, executor)
    follows = start.follows
    if start.is_spare:
        if (line := await _turn_comes(executor)) is None:
            await executor.close(hung=False)
            return 0
        follows = int(line) or None
    recorder = _recorder(start)
    try:
        process = EngineProcess(
            start.config, executor, start.address, start.keys, start.listen_fd, recorder, follows=follows
        )
    except zmq.ZMQError as error:
        if error.errno == errno.ENOENT:  # the parent has ended, and removed the folder of its sockets
            return 0
        raise
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin.fileno(), process.close)  # nothing more is written to it: readable means the parent died
    loop.add_signal_handler(signal.SIGTERM, process.close)
    return await process.run()


async def _replay(start: ReplayStart, executor: Any) -> int:
    """Writes a `ReplayReport`, or a user's mistake as a text, to the standard output."""
    from quire.core.engine.replay import replay
    from quire.core.errors import ConfigError
    from quire.core.flight.recording import open_files

    answer: object
    try:
        answer = await replay(open_files(map(Path, start.files)), executor, start.vocabularies)
    except ConfigError as error:
        answer = str(error)
    sys.stdout.buffer.write(msgspec.msgpack.encode(answer))
    sys.stdout.buffer.flush()
    return 0


def _recorder(start: EngineStart) -> Recorder:
    place = start.config.flight_recorder
    if place not in (None, "off"):
        return FlightRecorder(FileSegments(Path(place), start.config.process_name))
    if place == "off" or start.flight is None:
        return NO_RECORDER
    return FlightRecorder(MemorySegments(start.flight))


async def _turn_comes(executor: "Executor") -> bytes | None:
    """Prepares a spare engine's executor, and returns the parent's line when it wants the engine. None: the parent is
    gone, or the engine cannot be prepared."""
    loop, said = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), said.set)
    preparing = asyncio.create_task(executor.prepare())
    await said.wait()
    loop.remove_reader(sys.stdin.fileno())
    line = os.read(sys.stdin.fileno(), 100)
    if not line.endswith(b"\n"):
        preparing.cancel()
        return None
    await asyncio.wait([preparing])
    return line if preparing.exception() is None else None  # else the next engine starts afresh, and reports what fails


if __name__ == "__main__":
    main(int(sys.argv[1]))
