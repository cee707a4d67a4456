"""One engine process from its launch to its end, as its user's end of the connection sees it."""

import asyncio
import time
from collections.abc import Callable

import msgspec

from quire.core.engine.failures import failure_of
from quire.core.engine.running_engine import RunningEngine
from quire.core.errors import EngineDeadError, QuireError
from quire.core.logging import get_logger
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
        self._on_message = on_message
        self._encoder = protocol.encoder()
        self._decoder = msgspec.msgpack.Decoder(protocol.EngineOutput)
        self._is_closed = False
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

    async def until_end(self, silence_limit_seconds: float) -> QuireError:
        """Sends Hello and waits until the engine has ended; kills it when its event loop hangs."""
        self.send(protocol.Hello())
        limit = silence_limit_seconds
        ended = asyncio.create_task(self.engine.wait())
        try:
            while (left := limit - (time.monotonic() - self.heard_at)) > 0 and not ended.done():
                await asyncio.wait([ended], timeout=left)
            if not ended.done():
                self._condemn(f"the engine was silent for {limit:.0f} s and was killed.")
            code = await ended
            await asyncio.sleep(LAST_WORDS_SECONDS)
        finally:
            ended.cancel()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return self.end or EngineDeadError(f"the engine {how}.")

    def close(self) -> None:
        """Closes the connection, and kills the engine and any workers that outlived it."""
        self._is_closed = True
        self._channel.close()
        self.engine.kill()

    def _condemn(self, reason: str) -> None:
        """Kills the engine for a reason that is better known here."""
        self.end = self.end or EngineDeadError(reason)
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
