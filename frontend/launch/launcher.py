"""Starts engine processes, and watches each until it has ended."""

import asyncio
import contextlib
import fcntl
import glob
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from quire.core import envs
from quire.core.cluster.addresses import listen
from quire.core.cluster.messages import CoordinatorStart
from quire.core.config.resolved import EngineConfig
from quire.core.engine.running_engine import FREE_SECONDS, RunningEngine
from quire.core.errors import ConfigError
from quire.core.flight.dumps import Flight, FlightFolder, FlightMemory
from quire.core.logging import get_logger
from quire.core.process_activity import is_stopped
from quire.core.processes import is_ending, members, names_of_living, until_ended, wait_ended
from quire.core.wire.channel import CurveKeys
from quire.core.wire.rendezvous import Rendezvous, endpoint_of
from quire.frontend.launch.engine_main import EngineStart, turn
from quire.frontend.launch.ray_nodes import RayNodes
from quire.frontend.launch.shared_experts import Epochs

_PREFIX = "quire-"
_OWNER = "owner"
"""A file in each folder for sockets. The process that made the folder holds its lock."""
JOIN_SECONDS = 5.0
"""Limit of a blocking wait for an engine's end."""

logger = get_logger(__name__)


class EngineSubprocess(RunningEngine):
    """A running engine process, seen from its parent."""

    def __init__(
        self, process: subprocess.Popen, address: str, keys: CurveKeys | None, flight: Flight | None = None
    ) -> None:
        super().__init__(address, keys, process.pid)
        self._process = process
        self._flight = flight
        self._is_gone = False

    def begin(self, follows: int | None) -> bool:
        """Makes a spare engine load its model, once the processes of the group `follows` have ended. False if it has
        ended itself."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(turn(follows))
        except OSError:
            return False
        return self.can_begin

    @property
    def can_begin(self) -> bool:
        """True if a spare engine lives, and no signal has stopped it or its workers."""
        return self._process.poll() is None and not any(map(is_stopped, members(self._process.pid)))

    @property
    def group(self) -> int | None:
        """The process group of the engine and its workers; None once all of them have ended."""
        return None if self._is_gone else self._process.pid

    async def _exit_code(self) -> int:
        if (code := self._process.poll()) is not None:
            return code
        await until_ended(self._process.pid)
        return self._process.wait()

    def _kill(self) -> None:
        """Kills the engine and, through its process group, its workers. Kills once only, because the system reuses ids.
        Does not wait: a process with much memory takes seconds to end, and this event loop serves others."""
        self.was_killed = self._process.poll() is None and not is_ending(self._process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        if self._process.stdin is not None:
            self._process.stdin.close()

    def save_flight(self, reason: str) -> Path | None:
        return None if self._flight is None else self._flight.save(reason)

    def dump_stacks(self) -> bool:
        """Signals the whole process group. A process that has not come so far as to handle the signal ends by it, as it
        would soon after."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGUSR1)
        return True

    async def wait_freed(self, seconds: float) -> None:
        if self._is_gone:
            return
        try:
            async with asyncio.timeout(seconds):
                await self._exit_code()
                for pid in members(self._process.pid):
                    await until_ended(pid)
            self._is_gone = True
        except TimeoutError:
            self._say_what_lives(seconds)
        except OSError as error:  # there is no descriptor to wait with
            logger.warning("the end of the engine's processes cannot be waited for: %s", error)

    def join(self) -> None:
        if self._is_gone:
            return
        deadline = time.monotonic() + JOIN_SECONDS
        with contextlib.suppress(subprocess.TimeoutExpired, OSError):
            self._process.wait(JOIN_SECONDS)
            for pid in members(self._process.pid):
                wait_ended(pid, deadline - time.monotonic())
            self._is_gone = time.monotonic() < deadline
        if not self._is_gone:
            self._say_what_lives(JOIN_SECONDS)

    def _say_what_lives(self, seconds: float) -> None:
        """Logs the processes that have not ended in `seconds`."""
        if living := names_of_living(self._process.pid):
            logger.warning(
                "processes of an engine killed %g s ago have not ended, and still hold their memory, devices "
                "and ports: %s",
                seconds,
                ", ".join(living),
            )


class Listening(NamedTuple):
    """An address of this host for engines whose frontends are on other hosts, and the keys of those frontends."""

    address: str
    keys: CurveKeys


class EngineLauncher:
    """Starts one engine process after another at the same place, each at a new address: inside a private folder, on
    loopback TCP, or where frontends on other hosts reach it.

    Args:
        worker_factory: qualified name of the workers' factory, for benchmarks of everything but the model.
        cluster: where other nodes join; None: all workers run on this host.
        ray_nodes: starts the other nodes; None: others do.
        epochs: of the engines that share experts with this one, if any.
    """

    def __init__(
        self,
        config: EngineConfig,
        transport: Literal["ipc", "tcp"] | Listening = "ipc",
        *,
        worker_factory: str | None = None,
        cluster: CoordinatorStart | None = None,
        ray_nodes: RayNodes | None = None,
        epochs: Epochs | None = None,
    ) -> None:
        self.config = config
        self._transport = transport
        self._worker_factory = worker_factory
        self._cluster = cluster
        self._ray_nodes = ray_nodes
        self._epochs = epochs
        self._folder: PrivateFolder | None = None
        self._launched = 0
        self._ahead: EngineSubprocess | None = None
        self._spare: EngineSubprocess | None = None
        self._dropped: set[asyncio.Task[None]] = set()
        self._last: EngineSubprocess | None = None  # that was handed out

    @property
    def waits_for(self) -> str | None:
        return None if self._epochs is None else self._epochs.waits_for

    @property
    def folder(self) -> str | None:
        """The folder with the sockets, once there is one."""
        return None if self._folder is None else self._folder.path

    def launch_ahead(self) -> None:
        """Starts the engine that the first `launch` returns, so that it loads while the frontend starts."""
        if self._epochs is None or not self._epochs.has_other_hosts:
            self._ahead = self._start_in_common()

    def warm_up(self) -> None:
        """Starts the process that the next `launch` returns, as far as its model, if the options want a spare one.
        Replaces one that has ended or that a signal has stopped, with a warning."""
        if self._spare is not None and not self._spare.can_begin:
            logger.warning("the spare engine process %s was killed or stopped; another one starts", self._spare.pid)
            self._drop(self._spare)
            self._spare = None
        if self.config.keeps_spare and self._spare is None:
            self._spare = self.start(is_spare=True)

    async def launch(self) -> EngineSubprocess:
        """Starts an engine. The engine dies with this process, because its standard input closes."""
        ahead, self._ahead = self._ahead, None
        self._last = ahead if ahead is not None else await self._next(self._last)
        return self._last

    async def _next(self, before: EngineSubprocess | None) -> EngineSubprocess:
        """The spare engine, or else a new one. It waits itself for the end of the one before, unless others take part
        in its start."""
        if before is not None and (self._cluster is not None or self._epochs is not None):
            await before.wait_freed(FREE_SECONDS)
        follows = None if before is None else before.group
        spare, self._spare = self._spare, None
        if spare is not None:
            if spare.begin(follows):
                return spare
            self._drop(spare)
        if self._epochs is not None:
            await self._epochs.wait_for_hosts(self.config.place.data)
        return self._start_in_common(follows)

    def _drop(self, spare: EngineSubprocess) -> None:
        """Ends a spare engine that cannot take its turn, without waiting for its end."""
        spare.kill()
        task = asyncio.create_task(spare.wait_freed(FREE_SECONDS))
        self._dropped.add(task)
        task.add_done_callback(self._dropped.discard)

    def _start_in_common(self, follows: int | None = None) -> EngineSubprocess:
        if self._epochs is None:
            return self.start(follows=follows)
        epoch = self._epochs.epoch_of(self.config.place.data)
        engine = self.start(epoch.rendezvous.for_local_engine())
        epoch.add(engine)
        return engine

    def start(
        self, rendezvous: Rendezvous | None = None, *, is_spare: bool = False, follows: int | None = None
    ) -> EngineSubprocess:
        """Starts an engine at once. Its workers meet those of other engines at `rendezvous`.

        Args:
            is_spare: it imports everything, and waits for `EngineSubprocess.begin`.
            follows: the process group that shall have ended before it loads its model.
        """
        keys = CurveKeys.generate() if self._transport == "tcp" else None
        if isinstance(self._transport, Listening):
            keys = self._transport.keys
        if self._ray_nodes is not None:
            self._ray_nodes.ensure()
        environment = os.environ | _devices(self.config)
        with contextlib.ExitStack() as here:
            address, listen_fd = self._next_address(here)
            config = msgspec.structs.replace(self.config, is_restart=self._launched > 1)
            flight = _flight(config)
            start = EngineStart(
                *(config, address, keys, os.getpid(), self._worker_factory, self._cluster, rendezvous, listen_fd),
                flight=None if flight is None else flight.descriptors,
                is_spare=is_spare,
                follows=follows,
            )
            # A memory file and not the pipe, which may have no room: others are served here, and would wait until the
            # engine reads it.
            file = here.enter_context(open(os.memfd_create("quire-engine"), "wb", buffering=0))
            file.write(msgspec.msgpack.encode(start))
            inherited = [file.fileno(), *([] if rendezvous is None else rendezvous.fds)]
            if listen_fd is not None:
                inherited.append(listen_fd)
            if flight is not None and flight.descriptors is not None:
                inherited += flight.descriptors
            process = subprocess.Popen(
                # -P: no module of the user's folder shadows ours
                [sys.executable, "-P", "-m", "quire.frontend.launch.engine_main", str(file.fileno())],
                stdin=subprocess.PIPE,
                bufsize=0,  # or closing the pipe would write once more what a spare engine that has ended did not read
                pass_fds=inherited,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches the parent alone, which shuts the engine down in order
            )
        return EngineSubprocess(process, address, keys, flight)

    def retire(self) -> None:
        if self._epochs is not None:
            self._epochs.retire()

    def close(self) -> None:
        """Ends engines that were never handed out and the nodes that Ray runs, and removes the private folder."""
        unused, self._ahead, self._spare = (self._ahead, self._spare), None, None
        for engine in filter(None, unused):
            engine.kill()
            engine.join()
        if self._ray_nodes is not None:
            self._ray_nodes.close()
        if self._epochs is not None:
            self._epochs.close()
        if self._folder is not None:
            self._folder.remove()
            self._folder = None

    def _next_address(self, here: contextlib.ExitStack) -> tuple[str, int | None]:
        """The next engine's address, and on TCP the descriptor of a socket that listens there until `here` is closed.
        The engine inherits the socket itself, so that no other process takes the port meanwhile."""
        self._launched += 1
        if self._transport != "ipc":
            host = "127.0.0.1" if self._transport == "tcp" else self._transport.address
            listener = here.enter_context(listen(host))
            return endpoint_of(listener), listener.fileno()
        if self._folder is not None and not os.path.isdir(self._folder.path):
            self._folder.remove()  # a cleaner of temporary files has
            self._folder = None
        self._folder = self._folder or PrivateFolder()
        return f"ipc://{self._folder.path}/engine-{self._launched}.sock", None


def _flight(config: EngineConfig) -> Flight | None:
    match config.flight_recorder:
        case "off":
            return None
        case None:
            return FlightMemory(config.process_name)
        case folder:
            return FlightFolder(Path(folder))


def _devices(config: EngineConfig) -> dict[str, str]:
    """The environment that shows an engine its own GPUs, where several engines share this host's."""
    if config.device != "cuda" or config.place.num_local == 1:
        return {}
    number = config.layout.num_local
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(device) for device in range(number * config.place.num_local)]
    own = devices[config.place.local * number :][:number]
    if len(own) < number:
        raise ConfigError(
            f"--data-parallel-size-local {config.place.num_local} engines of {number} workers need "
            f"{number * config.place.num_local} GPUs, and CUDA_VISIBLE_DEVICES names {len(devices)}."
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(own)}


class PrivateFolder:
    """A folder for sockets that only this user reaches. It is known as abandoned when this process has ended.

    Raises:
        ConfigError: it cannot be made.
    """

    def __init__(self) -> None:
        base = envs.read("RPC_BASE_PATH")
        try:
            self.path = tempfile.mkdtemp(prefix=_PREFIX, dir=base)
            # Locked before it has its name, so that nobody ever finds it without the lock.
            self._owner = os.open(f"{self.path}/new", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._owner, fcntl.LOCK_EX)
            os.rename(f"{self.path}/new", f"{self.path}/{_OWNER}")
        except OSError as error:
            raise _unusable(base, error) from None
        _remove_abandoned(os.path.dirname(self.path))

    def remove(self) -> None:
        """Removes the folder. Does nothing if it is gone."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._owner)


def _remove_abandoned(base: str) -> None:
    """Removes folders of processes that were killed together with their engines, which else do so."""
    for path in glob.glob(f"{glob.escape(base)}/{_PREFIX}*/{_OWNER}"):
        with contextlib.suppress(OSError), open(path, "rb") as owner:  # another user's, or removed meanwhile
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(os.path.dirname(path), ignore_errors=True)


def _unusable(base: str | None, error: OSError) -> ConfigError:
    return ConfigError(
        f"The sockets of the engine need a folder in {base or tempfile.gettempdir()!r}, which cannot be made: "
        f"{error.strerror}. QUIRE_RPC_BASE_PATH names another place."
    )
