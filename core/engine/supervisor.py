"""Keeps an engine running: launches it, listens to it, notices its end, and launches the next one.

The supervisor knows nothing of requests. Its user holds them, and hears when an engine is ready, when one crashes, and
when no other follows. An engine that fails ends alone: the supervisor goes on until `close`, or until `RestartPolicy`
finds another start hopeless. If the supervisor itself fails, it reports the engine as dead, never as healthy.
"""

import asyncio
import os
import time
from typing import Literal, Protocol

import msgspec
from msgspec import Struct

from quire.core import envs
from quire.core.engine.failures import explain, failure_of, fault_of, is_external
from quire.core.engine.launcher import EngineHandle, Launcher, NoMoreEnginesError
from quire.core.engine.restart_policy import Fault, RestartPolicy
from quire.core.errors import EngineDeadError, QuireError
from quire.core.logging import get_logger
from quire.core.processes import is_ending
from quire.core.wire import protocol
from quire.core.wire.channel import Channel, connect_dealer
from quire.core.wire.protocol import EngineReady

logger = get_logger(__name__)

CLOSE_SECONDS = 5.0
FREE_SECONDS = 10.0
"""Limit of the next engine's wait for the killed processes of the one before. With much memory that takes seconds."""
DISCONNECTED_SECONDS, DISCONNECTED_AFAR_SECONDS = 1.0, 5.0
"""Time after the end of a connection in which the engine's own end may be noticed, which is the usual reason. For an
engine on another host, that host's end may be noticed, by missing heartbeats within 3 s."""
LAST_WORDS_SECONDS = 0.05
"""Time after an engine's end in which its last message may still arrive."""

EngineMessage = (
    protocol.StepOutputs | protocol.Heartbeat | protocol.Profiled | protocol.PrefixCacheReset | protocol.WorkersAnswered
)
"""Messages of an engine that its user gets."""


class EngineUser(Protocol):
    """The object on whose behalf the engine runs."""

    @property
    def has_work(self) -> bool:
        """True if the engine holds requests."""

    def on_ready(self, ready: EngineReady) -> None:
        """Handles an engine that is ready, and holds no request yet."""

    def on_message(self, message: EngineMessage) -> None:
        """Handles a message of the engine. An exception ends that engine, because the message is lost."""

    def on_crash(self, end: QuireError) -> None:
        """Handles the end of an engine that was ready. Its requests are lost."""

    def on_dead(self, error: QuireError) -> None:
        """Handles the final end: no engine runs, and none will be started."""


class EngineStatus(Struct, frozen=True, omit_defaults=True):
    """The engine's state, for health checks."""

    state: Literal["starting", "serving", "restarting", "dead"]
    silent_seconds: float | None  # since an engine's last message; a healthy engine sends one at least every 2 s
    reason: str | None = None  # why the engine is dead, or why it is being restarted
    waits_for: str | None = None  # what is missing before it can start, such as a node


class _Life(Struct):
    """One engine, from its launch to its end."""

    handle: EngineHandle
    channel: Channel
    heard_at: float  # CLOCK_MONOTONIC seconds of its last message; of its launch, before the first
    ready_at: float | None = None
    is_heard: bool = False
    had_output: bool = False
    waits_for: str | None = None  # as of its last heartbeat
    end: QuireError | None = None  # set before the process has ended, where more is known than its exit code


class EngineSupervisor:
    """Use from one event loop.

    Args:
        launcher: starts the engine, the first time and after a crash.
        user: gets the engine's messages, and hears when it starts and ends.
        restarts: decides whether an engine that ended is followed by another.
    """

    def __init__(self, launcher: Launcher, user: EngineUser, restarts: RestartPolicy) -> None:
        self._process_id = os.getpid()
        self._launcher = launcher
        self._user = user
        self._restarts = restarts
        self._encoder = protocol.encoder()
        self._decoder = msgspec.msgpack.Decoder(protocol.EngineOutput)
        self._started: asyncio.Future[EngineReady] | None = None
        self._task: asyncio.Task[QuireError] | None = None
        self._life: _Life | None = None
        self._handle: EngineHandle | None = None  # of the last engine that was launched
        self._heard_at: float | None = None  # from any engine
        self._last_end: QuireError | None = None
        self._dead: QuireError | None = None
        self._silence_limit_seconds = envs.read_float("ENGINE_HEARTBEAT_TIMEOUT_S")

    async def start(self) -> EngineReady:
        """Starts the engine, once; later calls wait for the same start. A failed first start is repeated only if
        another engine was at fault, or a host was lost.

        Raises:
            ConfigError: the launcher says that a setting is at fault.
            ModelLoadError: the engine says that the checkpoint or the memory is at fault.
            EngineDeadError: the engine ended without saying why.
        """
        if self._started is None:
            self._started = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._supervise(self._started))
            self._task.add_done_callback(self._on_supervision_ended)
        return await asyncio.shield(self._started)

    @property
    def is_ready(self) -> bool:
        """True if an engine takes messages now."""
        life = self._life
        return life is not None and life.ready_at is not None and life.end is None

    @property
    def handle(self) -> EngineHandle | None:
        """The running engine; None while none runs."""
        return self._life.handle if self._life is not None else None

    @property
    def pid(self) -> int | None:
        """Process id of the running engine; another one after a crash."""
        return self._life.handle.pid if self._life is not None else None

    def send(self, message: protocol.EngineInput) -> None:
        """Sends a message to the engine, which must be ready. The message is lost if the engine dies meanwhile."""
        assert self._life is not None
        self._life.channel.send([self._encoder.encode(message)])

    @property
    def is_dead(self) -> bool:
        """True if the engine is gone for good."""
        return self._dead is not None

    def check_alive(self) -> None:
        """Raises EngineDeadError when the engine is gone for good. An engine being restarted is alive."""
        if self._dead is not None:
            raise EngineDeadError(f"The engine is gone: {self._dead} Restart the server.")

    def status(self) -> EngineStatus:
        """The engine's state at this moment."""
        silent = None if self._heard_at is None else round(time.monotonic() - self._heard_at, 3)
        if self._dead is not None:
            return EngineStatus("dead", silent, str(self._dead))
        if self.is_ready:
            return EngineStatus("serving", silent)
        if self._started is not None and self._started.done():
            return EngineStatus("restarting", silent, str(self._last_end), self._waits_for)
        reason = None if self._last_end is None else str(self._last_end)
        return EngineStatus("starting", silent, reason, self._waits_for)

    @property
    def _waits_for(self) -> str | None:
        return self._launcher.waits_for if self._life is None else self._life.waits_for

    def give_up(self, reason: QuireError) -> None:
        """Ends the engine by force, and starts no other. Harmless when it is gone for good."""
        self._dead = self._dead or reason
        if self._life is not None:
            self._life.handle.kill()

    async def close(self) -> None:
        """Stops the engine: in order if it serves, by force while it loads or does not answer. Returns when a process
        of this host has ended."""
        self._dead = self._dead or EngineDeadError("the engine was shut down.")
        try:
            if self._task is not None and self.is_ready and self._life is not None and self._life.handle.is_owned:
                self.send(protocol.Shutdown())
                await asyncio.wait([self._task], timeout=CLOSE_SECONDS)
        finally:
            self.close_nowait()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._handle is not None:
            await self._handle.wait_freed(CLOSE_SECONDS)

    def close_nowait(self) -> None:
        """Ends the engine by force, without waiting for anything."""
        if os.getpid() != self._process_id:  # a fork inherits this object, and not the engine
            return
        self.give_up(EngineDeadError("the engine was shut down."))
        self._launcher.close()

    def join(self) -> None:
        """Blocks, after `close_nowait`, until the processes have ended: see `EngineHandle.join`."""
        if os.getpid() == self._process_id and self._handle is not None:
            self._handle.join()

    # ----------------------------------------------------------------------------------------- one engine after another

    async def _supervise(self, started: "asyncio.Future[EngineReady]") -> QuireError:
        """Runs one engine after another. Returns the reason for the last one's end."""
        while True:
            self._last_end = end = await self._run_one_engine()
            if self._dead is not None or not (started.done() or is_external(end)):
                return end
            if (why := self._restarts.why_hopeless) is not None:
                logger.error("%s The engine is not restarted any more: %s", end, why)
                return EngineDeadError(f"{end} {why}")
            pause = self._restarts.pause_seconds
            logger.error("%s The engine is restarted in %.1f s.", end, pause)
            await asyncio.sleep(pause)
            if self._dead is not None:  # closed meanwhile
                return end

    async def _run_one_engine(self) -> QuireError:
        """Launches an engine, waits for its end and returns why it ended. Any error ends this engine alone."""
        try:
            self._life = life = await self._launch()
        except NoMoreEnginesError as error:
            self._dead = self._dead or error
            return self._dead
        except Exception as error:
            failure = explain(error)
            self._restarts.add(ready_seconds=None, had_work=False, had_output=False, fault=fault_of(failure))
            return failure
        end: QuireError = EngineDeadError("the engine was shut down.")
        fault: Fault = "own"
        try:
            end = await self._until_end(life)
            fault = fault_of(end)
        except Exception as error:
            end = life.end or explain(error)
            fault = "elsewhere" if is_external(error) else "own"  # not as the engine says, but as is known
        finally:
            self._bury(life, end, fault)
        await life.handle.wait_freed(FREE_SECONDS)  # or the next engine finds its memory and devices taken
        return end

    async def _launch(self) -> _Life:
        if self._launcher.waits_for is not None:
            self._restarts.acquit()
        self._handle = handle = await self._launcher.launch()
        try:
            if self._dead is not None:  # closed meanwhile
                raise self._dead
            channel = connect_dealer(
                handle.address, handle.keys, self._on_frames, on_disconnected=self._on_disconnected
            )
        except BaseException:
            handle.kill()
            await handle.wait_freed(CLOSE_SECONDS)
            raise
        return _Life(handle, channel, time.monotonic())

    async def _until_end(self, life: _Life) -> QuireError:
        """Sends Hello and waits until the engine has ended; kills it when its event loop hangs."""
        self.send(protocol.Hello())
        limit = self._silence_limit_seconds
        ended = asyncio.create_task(life.handle.wait())
        try:
            while (left := limit - (time.monotonic() - life.heard_at)) > 0 and not ended.done():
                await asyncio.wait([ended], timeout=left)
            if not ended.done():
                self._condemn(life, EngineDeadError(f"the engine was silent for {limit:.0f} s and was killed."))
                life.handle.kill()
            code = await ended
            await asyncio.sleep(LAST_WORDS_SECONDS)
        finally:
            ended.cancel()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return life.end or EngineDeadError(f"the engine {how}.")

    def _condemn(self, life: _Life, end: QuireError) -> None:
        """Records why an engine is about to end. The engine takes no messages from now on."""
        if life.end is None:
            life.end = self._last_end = end

    def _bury(self, life: _Life, end: QuireError, fault: Fault) -> None:
        """Frees the resources of an engine that ended, and reports its end to the user."""
        ready_seconds = None if life.ready_at is None else time.monotonic() - life.ready_at
        had_work, had_output = self._user.has_work, life.had_output
        self._restarts.add(ready_seconds=ready_seconds, had_work=had_work, had_output=had_output, fault=fault)
        self._life, self._last_end = None, end
        life.channel.close()
        life.handle.kill()  # and workers that outlived it
        if ready_seconds is not None:
            self._user.on_crash(end)

    def _on_supervision_ended(self, task: "asyncio.Task[QuireError]") -> None:
        """Marks the engine as dead, however the supervision ended, because its end would go unnoticed from now on."""
        failure = None if task.cancelled() else task.exception()
        if failure is not None:
            logger.error("the supervision of the engine failed, so the engine is given up", exc_info=failure)
        if self._dead is None:
            failed = task.cancelled() or failure is not None
            self._dead = EngineDeadError("its supervision failed; the log tells why.") if failed else task.result()
        if self._life is not None:
            self._life.handle.kill()
        assert self._started is not None
        if not self._started.done():
            self._started.set_exception(self._dead)
            self._started.exception()  # perhaps nobody waits for it any more
        self._launcher.retire()
        self._user.on_dead(self._dead)

    # --------------------------------------------------------------------------------------------------------- messages

    def _on_frames(self, frames: list[bytes]) -> None:
        life = self._life
        assert life is not None
        life.heard_at, life.is_heard = time.monotonic(), True
        self._heard_at = life.heard_at
        try:
            self._on_message(life, self._decoder.decode(frames[0]))
        except Exception:
            logger.exception("a message of the engine could not be handled, so the engine is killed")
            self._condemn(life, EngineDeadError("a message of the engine could not be handled."))
            life.channel.close()  # after a lost message no later one may be processed
            life.handle.kill()

    def _on_disconnected(self) -> None:
        is_afar = self._life is not None and self._life.handle.pid is None
        seconds = DISCONNECTED_AFAR_SECONDS if is_afar else DISCONNECTED_SECONDS
        asyncio.get_running_loop().call_later(seconds, self._miss, self._life)

    def _miss(self, life: _Life | None) -> None:
        """Kills an engine that still runs after its connection ended: messages are lost, and it takes this user for
        gone."""
        if life is None or life is not self._life or not life.is_heard:
            return
        if life.handle.pid is None or not is_ending(life.handle.pid):
            self._condemn(life, EngineDeadError("the connection to the engine was lost, and messages with it."))
            life.handle.kill()

    def _on_message(self, life: _Life, message: protocol.EngineOutput) -> None:
        match message:
            case protocol.StepOutputs():
                life.had_output = life.had_output or message.stats.num_steps > 0
                self._user.on_message(message)
            case EngineReady():
                life.ready_at = time.monotonic()
                assert self._started is not None
                if not self._started.done():
                    self._started.set_result(message)
                self._user.on_ready(message)
            case protocol.Heartbeat():
                life.waits_for = message.waits_for
                self._user.on_message(message)
            case protocol.EngineFailed():
                self._condemn(life, failure_of(message))
            case _:
                self._user.on_message(message)
