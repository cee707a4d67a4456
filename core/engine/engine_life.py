"""One engine process from its launch to its end, as its user's end of the connection sees it."""

import asyncio
import time
from collections.abc import Callable

import msgspec

from quire.core.engine.failures import end_of, failure_of
from quire.core.engine.running_engine import RunningEngine
from quire.core.engine.silence import TICK_SECONDS, SilenceWatch, Verdict
from quire.core.errors import EngineDeadError, EngineKilledError, QuireError
from quire.core.logging import get_logger
from quire.core.process_ends import EndOfProcess
from quire.core.processes import is_ending
from quire.core.wire import protocol
from quire.core.wire.channel import connect_dealer
from quire.core.wire.protocol import EngineReady

logger = get_logger(__name__)

DISCONNECTED_SECONDS, DISCONNECTED_AFAR_SECONDS = 1.0, 5.0
"""Time after the end of a connection in which the engine's own end may be noticed, which is the usual reason. For an
engine on another host, that host's end may be noticed, by missing heartbeats within 3 s."""
LAST_WORDS_SECONDS = 0.05
"""Time after an engine's end in which its last message may still arrive."""
FAREWELL_SECONDS = 3.0
"""Limit of the wait for the end of an engine that has said why it fails."""
STACKS_SECONDS = 0.2
"""Time for the processes of a hung engine to write their stacks."""

EngineMessage = (
    protocol.StepOutputs | protocol.Heartbeat | protocol.Profiled | protocol.PrefixCacheReset | protocol.WorkersAnswered
)
"""Messages of an engine that its user gets."""


class EngineLife:
    """The connection to a running engine, and what is known of the engine. Use from one event loop.

    Args:
        on_message: handles a message. An exception ends the engine, because the message is lost.

    Attributes:
        heard_at: CLOCK_MONOTONIC seconds of the last message; of the launch, before the first.
        ready_at: the time of `EngineReady`.
        waits_for: what is missing for the engine's start, as of its last heartbeat.
        end: why the engine ends, if more is known than its exit code. It takes no messages from then on.
    """

    def __init__(self, engine: RunningEngine, on_message: Callable[[EngineMessage | EngineReady], None]) -> None:
        self.engine = engine
        self.heard_at = time.monotonic()
        self.ready_at: float | None = None
        self.is_heard = False
        self.had_output = False
        self.waits_for: str | None = None
        self.end: QuireError | None = None
        self._failed_at: float | None = None  # as it said itself
        self._on_message = on_message
        self._encoder = protocol.encoder()
        self._decoder = msgspec.msgpack.Decoder(protocol.EngineOutput)
        self._is_closed = False
        self._ending = EndOfProcess(is_here=engine.pid is not None)
        self._channel = connect_dealer(
            engine.address, engine.keys, self._on_frames, on_disconnected=self._on_disconnected
        )

    @property
    def is_ready(self) -> bool:
        """True if the engine takes messages now."""
        return self.ready_at is not None and self.end is None

    def send(self, message: protocol.EngineInput) -> None:
        """Sends a message. It is lost if the engine dies meanwhile."""
        self._channel.send([self._encoder.encode(message)])

    async def until_end(self, watch: SilenceWatch, has_work: Callable[[], bool]) -> QuireError:
        """Sends Hello and waits until the engine has ended; kills it when its event loop hangs.

        Args:
            watch: judges its silence.
            has_work: whether it holds requests.
        """
        self.send(protocol.Hello())
        ended = asyncio.create_task(self.engine.wait())
        try:
            while not ended.done():
                await asyncio.wait([ended], timeout=TICK_SECONDS)
                if ended.done():
                    break
                verdict = watch.look(self.heard_at, is_busy=self.is_ready and has_work())
                is_late = self._failed_at is not None and time.monotonic() - self._failed_at > FAREWELL_SECONDS
                if verdict is not None:
                    await self._condemn_silent(verdict)
                elif is_late:
                    self.engine.kill()
                if verdict is not None or is_late:
                    break
            code = await ended
            if self.end is None:
                await asyncio.sleep(LAST_WORDS_SECONDS)
        finally:
            ended.cancel()
        return self.end or end_of(self._ending, code, was_ready=self.ready_at is not None)

    def close(self) -> None:
        """Closes the connection, and kills the engine and any workers that outlived it."""
        self._is_closed = True
        self._channel.close()
        self.engine.kill()

    def _condemn(self, reason: str) -> None:
        """Kills the engine for a reason that is better known here."""
        self.end = self.end or EngineDeadError(reason)
        self.engine.kill()

    async def _condemn_silent(self, verdict: Verdict) -> None:
        """Kills an engine that hangs, after its processes have written their stacks."""
        kind = EngineKilledError if verdict.is_stopped else EngineDeadError
        self.end = self.end or kind(f"the engine {verdict.reason}.")
        if not verdict.is_stopped and self.engine.dump_stacks():
            await asyncio.sleep(STACKS_SECONDS)
        self.engine.kill()

    def _on_frames(self, frames: list[bytes]) -> None:
        self.heard_at, self.is_heard = time.monotonic(), True
        try:
            self._hear(self._decoder.decode(frames[0]))
        except Exception:
            logger.exception("a message of the engine could not be handled, so the engine is killed")
            self._channel.close()  # after a lost message no later one may be processed
            self._condemn("a message of the engine could not be handled.")

    def _hear(self, message: protocol.EngineOutput) -> None:
        match message:
            case protocol.EngineFailed():
                self.end = self.end or failure_of(message)
                self._failed_at = time.monotonic()
                if self.engine.is_owned and self.engine.pid is not None and not message.needs_time:
                    self.engine.kill()  # sooner than it ends its workers and itself in order
                return
            case protocol.StepOutputs():
                self.had_output = self.had_output or message.stats.num_steps > 0
            case EngineReady():
                self.ready_at = time.monotonic()
            case protocol.Heartbeat():
                self.waits_for = message.waits_for
        self._on_message(message)

    def _on_disconnected(self) -> None:
        seconds = DISCONNECTED_AFAR_SECONDS if self.engine.pid is None else DISCONNECTED_SECONDS
        asyncio.get_running_loop().call_later(seconds, self._miss)

    def _miss(self) -> None:
        """Kills an engine that still runs after its connection ended: messages are lost, and it takes this user for
        gone."""
        if self._is_closed or not self.is_heard:
            return
        if self.engine.pid is None or not is_ending(self.engine.pid):
            self._condemn("the connection to the engine was lost, and messages with it.")
