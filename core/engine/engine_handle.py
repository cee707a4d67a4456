"""The handle on one engine, wherever it runs: launches it, notices its end, and launches the next one.

The handle knows nothing of requests. Its user holds them, and hears when an engine is ready, when one crashes, and when
no other follows. An engine that fails ends alone: the handle goes on until `close`, or until `RestartPolicy` finds
another start hopeless. If the handle itself fails, it reports the engine as dead, never as healthy.
"""

import asyncio
import os
import time
from typing import Protocol

from quire.core import envs
from quire.core.engine.engine_life import EngineLife, EngineMessage
from quire.core.engine.failures import explain, fault_of, is_external
from quire.core.engine.fleet_status import EngineStatus
from quire.core.engine.launcher import Launcher, NoMoreEnginesError
from quire.core.engine.restart_policy import Fault, RestartPolicy
from quire.core.engine.running_engine import FREE_SECONDS, EngineAddress, RunningEngine
from quire.core.engine.silence import SilenceWatch
from quire.core.errors import EngineDeadError, QuireError
from quire.core.logging import get_logger
from quire.core.wire import protocol
from quire.core.wire.protocol import EngineReady

logger = get_logger(__name__)

CLOSE_SECONDS = 5.0
SPARE_SECONDS = 5.0
"""Time after an engine's start in which no spare one is made ready, which would compete with the first requests."""
SPARE_AFTER_RESTART_SECONDS = 1.0
"""The same after a restart, which another may follow: without a spare engine, that one takes far longer."""
SPARE_CHECK_SECONDS = 5.0
"""Time between looks at the spare engine, which may have been killed or stopped meanwhile."""
SPARE_RETRY_SECONDS = 60.0
"""Time until the next attempt, where no spare engine can be started."""


class EngineUser(Protocol):
    """The object on whose behalf engines run."""

    def has_work(self, engine: "EngineHandle") -> bool:
        """Returns True if the engine holds requests."""

    def on_ready(self, engine: "EngineHandle", ready: EngineReady) -> None:
        """Handles an engine that is ready, and holds no request yet."""

    def on_message(self, engine: "EngineHandle", message: EngineMessage) -> None:
        """Handles a message of the engine. An exception ends that engine, because the message is lost."""

    def on_crash(self, engine: "EngineHandle", end: QuireError) -> None:
        """Handles the end of an engine that was ready. Its requests are lost."""

    def on_dead(self, engine: "EngineHandle", error: QuireError) -> None:
        """Handles the final end: no engine runs, and none will be started."""


class EngineHandle:
    """One engine after another with the same number. Use from one event loop.

    Args:
        number: the engine's number among those of its user, from 0.
        launcher: starts the engine, the first time and after a crash.
        user: gets the engine's messages, and hears when it starts and ends.
        restarts: decides whether an engine that ended is followed by another.
    """

    def __init__(self, number: int, launcher: Launcher, user: EngineUser, restarts: RestartPolicy) -> None:
        self.number = number
        self._process_id = os.getpid()
        self._launcher = launcher
        self._user = user
        self._restarts = restarts
        self._started: asyncio.Future[EngineReady] | None = None
        self._task: asyncio.Task[QuireError] | None = None
        self._life: EngineLife | None = None
        self._engine: RunningEngine | None = None  # the last one that was launched
        self._ending: set[asyncio.Task[None]] = set()
        self._heard_at: float | None = None  # from engines before
        self._last_end: QuireError | None = None
        self._dead: QuireError | None = None
        self._num_restarts = 0
        set_by_user = envs.read("ENGINE_HEARTBEAT_TIMEOUT_S") is not None
        self._silence_limit_seconds = envs.read_float("ENGINE_HEARTBEAT_TIMEOUT_S") if set_by_user else None

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
        return self._life is not None and self._life.is_ready

    @property
    def address(self) -> EngineAddress:
        """The address of the running engine, for other processes; another one after a crash."""
        assert self._life is not None
        engine = self._life.engine
        return EngineAddress(engine.address, engine.keys, engine.pid)

    @property
    def pid(self) -> int | None:
        """Process id of the running engine, which changes after a crash. None while none runs, or on another host."""
        return self._life.engine.pid if self._life is not None else None

    def send(self, message: protocol.EngineInput) -> None:
        """Sends a message to the engine, which must be ready. The message is lost if the engine dies meanwhile."""
        assert self._life is not None
        self._life.send(message)

    @property
    def is_dead(self) -> bool:
        """True if the engine is gone for good."""
        return self._dead is not None

    def check_alive(self) -> None:
        """Raises EngineDeadError when the engine is gone for good. An engine being restarted is alive."""
        if self._dead is not None:
            raise EngineDeadError(f"The engine is gone: {self._dead} Restart the server.")

    @property
    def heard_at(self) -> float | None:
        """The time of an engine's last message, in seconds of CLOCK_MONOTONIC; None before the first."""
        life = self._life
        return life.heard_at if life is not None and life.is_heard else self._heard_at

    def status(self) -> EngineStatus:
        """The engine's state at this moment."""
        life = self._life
        heard_at, restarts = self.heard_at, self._num_restarts
        silent = None if heard_at is None else round(time.monotonic() - heard_at, 3)
        if self._dead is not None:
            return EngineStatus("dead", silent, str(self._dead), restarts=restarts)
        if self.is_ready:
            return EngineStatus("serving", silent, restarts=restarts)
        end = life.end if life is not None and life.end is not None else self._last_end
        waits_for = self._launcher.waits_for if life is None else life.waits_for
        if self._started is not None and self._started.done():
            return EngineStatus("restarting", silent, str(end), waits_for, restarts)
        return EngineStatus("starting", silent, None if end is None else str(end), waits_for)

    def give_up(self, reason: QuireError) -> None:
        """Ends the engine by force, and starts no other. Harmless when it is gone for good."""
        self._dead = self._dead or reason
        if self._life is not None:
            self._life.engine.kill()

    async def close(self) -> None:
        """Stops the engine: in order if it serves, by force while it loads or does not answer. Returns when a process
        of this host has ended."""
        self._dead = self._dead or EngineDeadError("the engine was shut down.")
        try:
            if self._task is not None and self.is_ready and self._life is not None and self._life.engine.is_owned:
                self.send(protocol.Shutdown())
                await asyncio.wait([self._task], timeout=CLOSE_SECONDS)
        finally:
            self.close_nowait()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._engine is not None:
            await self._engine.wait_freed(CLOSE_SECONDS)
        if self._ending:
            await asyncio.wait(self._ending, timeout=CLOSE_SECONDS)

    def close_nowait(self) -> None:
        """Ends the engine by force, without waiting for anything."""
        if os.getpid() != self._process_id:  # a fork inherits this object, and not the engine
            return
        self.give_up(EngineDeadError("the engine was shut down."))
        self._launcher.close()

    def join(self) -> None:
        """Blocks, after `close_nowait`, until the processes have ended: see `RunningEngine.join`."""
        if os.getpid() == self._process_id and self._engine is not None:
            self._engine.join()

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
            self._num_restarts += 1
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
            end = await life.until_end(self._silence_watch(life.engine), self._has_work)
            fault = fault_of(end)
        except Exception as error:
            end = life.end or explain(error)
            fault = "elsewhere" if is_external(error) else "own"  # not as the engine says, but as is known
        finally:
            self._bury(life, end, fault)
        # Beside the start of the next one, which waits for it before it takes memory and devices.
        task = asyncio.create_task(
            _see_off(life.engine, end, saves_flight=life.ready_at is not None and not self._dead)
        )
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return end

    def _silence_watch(self, engine: RunningEngine) -> SilenceWatch:
        return SilenceWatch(engine.pid if engine.is_owned else None, self._silence_limit_seconds)

    def _has_work(self) -> bool:
        """True if the engine holds requests, and it is this process that ends it when it hangs."""
        return self._life is not None and self._life.engine.is_owned and self._user.has_work(self)

    async def _launch(self) -> EngineLife:
        if self._launcher.waits_for is not None:
            self._restarts.acquit()
        self._engine = engine = await self._launcher.launch()
        try:
            if self._dead is not None:  # closed meanwhile
                raise self._dead
            return EngineLife(engine, self._on_message)
        except BaseException:
            engine.kill()
            await engine.wait_freed(CLOSE_SECONDS)
            raise

    def _bury(self, life: EngineLife, end: QuireError, fault: Fault) -> None:
        """Frees the resources of an engine that ended, and reports its end to the user."""
        ready_seconds = None if life.ready_at is None else time.monotonic() - life.ready_at
        had_work, had_output = self._user.has_work(self), life.had_output
        self._restarts.add(ready_seconds=ready_seconds, had_work=had_work, had_output=had_output, fault=fault)
        self._life, self._last_end = None, end
        self._heard_at = life.heard_at if life.is_heard else self._heard_at
        life.close()
        if ready_seconds is not None:
            self._user.on_crash(self, end)

    def _on_supervision_ended(self, task: "asyncio.Task[QuireError]") -> None:
        """Marks the engine as dead, however the supervision ended, because its end would go unnoticed from now on."""
        failure = None if task.cancelled() else task.exception()
        if failure is not None:
            logger.error("the supervision of the engine failed, so the engine is given up", exc_info=failure)
        if self._dead is None:
            failed = task.cancelled() or failure is not None
            self._dead = EngineDeadError("its supervision failed; the log tells why.") if failed else task.result()
        if self._life is not None:
            self._life.engine.kill()
        assert self._started is not None
        if not self._started.done():
            self._started.set_exception(self._dead)
            self._started.exception()  # perhaps nobody waits for it any more
        self._launcher.retire()
        self._user.on_dead(self, self._dead)

    def _on_message(self, message: EngineMessage | EngineReady) -> None:
        if not isinstance(message, EngineReady):
            self._user.on_message(self, message)
            return
        assert self._started is not None
        if not self._started.done():
            self._started.set_result(message)
        self._user.on_ready(self, message)
        if self._life is not None and self._life.engine.is_owned:
            seconds = min(SPARE_SECONDS, SPARE_AFTER_RESTART_SECONDS) if self._num_restarts else SPARE_SECONDS
            asyncio.get_running_loop().call_later(seconds, self._warm_up, self._life)

    def _warm_up(self, life: EngineLife) -> None:
        """Keeps a spare engine ready, while the one that started lately serves."""
        if self._dead is not None or self._life is not life:
            return
        try:
            self._launcher.warm_up()
            seconds = SPARE_CHECK_SECONDS
        except Exception as error:  # then the next start takes longer
            logger.warning("no spare engine can be started: %s", explain(error))
            seconds = SPARE_RETRY_SECONDS
        asyncio.get_running_loop().call_later(seconds, self._warm_up, life)


async def _see_off(engine: RunningEngine, end: QuireError, *, saves_flight: bool) -> None:
    """Waits until an engine has freed what it held, and keeps what its flight recorder has."""
    await engine.wait_freed(FREE_SECONDS)
    if saves_flight:
        await asyncio.to_thread(_save_flight, engine, str(end))


def _save_flight(engine: RunningEngine, reason: str) -> None:
    """Blocks for some milliseconds, in which the next engine starts."""
    path = engine.save_flight(reason)
    if path is not None:
        logger.warning(
            "what the engine did before it ended is in %s: `quire doctor` tells what, `quire replay` runs it again",
            path,
        )
