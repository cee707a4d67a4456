"""Asks helper processes to decode media, and says what went wrong in terms of the request."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

import msgspec

from quire.core.errors import ParameterError, UnavailableError
from quire.core.logging import get_logger
from quire.frontend.helpers.helper import Helper, HelperDied, HelperKilled, HelperProgram, OutOfTime
from quire.frontend.helpers.pool import HelperPool
from quire.frontend.keys.caller import current_owner
from quire.frontend.media.messages import FloatType, MediaAnswer, MediaQuestion, MediaRefused, MediaSetup

logger = get_logger(__name__)

A = TypeVar("A", bound=msgspec.Struct)

LIMIT_CPU_SECONDS = 120.0
BACKSTOP_SECONDS = 300.0
RETRY_SECONDS = 10.0
LIMIT_BYTES = 3 * 2**30
MAX_HELPERS = 2
_HELPER = "quire.frontend.media.helper_process"
_BYTES_PER_TICKET = 4096
"""Bytes of media that wait in the queue of helpers as long as one byte of another question."""


class MediaDecoder:
    """Decodes media for one model. To be used from one event loop.

    Args:
        folder: the model's, with the settings of its processors.
        dtype: the model's, which what its tower reads is rounded to.
        limit_cpu_seconds: processor time of one question. A helper that exceeds it ends, and the data is refused.
        limit_bytes: memory of one question, enforced in the same way.
        backstop_seconds: wall-clock time of one question, start of the helper included.
    """

    def __init__(
        self,
        folder: str,
        *,
        dtype: FloatType = "float32",
        limit_cpu_seconds: float = LIMIT_CPU_SECONDS,
        limit_bytes: int = LIMIT_BYTES,
        backstop_seconds: float = BACKSTOP_SECONDS,
    ) -> None:
        self._limit_cpu_seconds = limit_cpu_seconds
        self._limit_bytes = limit_bytes
        self._backstop_seconds = backstop_seconds
        setup = MediaSetup(folder, limit_bytes, limit_cpu_seconds, dtype)
        program = HelperProgram(_HELPER, setup, msgspec.msgpack.Decoder(MediaAnswer))
        self._pool: HelperPool[MediaAnswer] = HelperPool(program, max_helpers=MAX_HELPERS)

    async def ask(
        self,
        question: MediaQuestion,
        answer_type: type[A],
        *,
        num_bytes: int,
        param: str,
        on_begin: Callable[[], None] = lambda: None,
    ) -> A:
        """The answer to a question about `num_bytes` of data, which the request has in `param`.

        Args:
            on_begin: called when a helper begins.

        Raises:
            ParameterError: the data cannot be decoded within the limits; `param` names the field.
            UnavailableError: the host is too busy.
        """
        for attempt in range(2):
            try:
                answer = await self._ask(question, num_bytes, param, on_begin)
                break
            except HelperKilled:
                logger.warning("somebody ended the helper that decoded %s", param)
                if attempt:
                    raise UnavailableError(
                        f"{param} was not decoded, because somebody twice ended the helper process that did it; send "
                        "the request again later.",
                        retry_after_seconds=RETRY_SECONDS,
                    ) from None
        if isinstance(answer, MediaRefused):
            field = answer.field or param
            raise ParameterError(f"{field} {answer.message}.", param=field)
        assert isinstance(answer, answer_type)
        return answer

    async def _ask(
        self, question: MediaQuestion, num_bytes: int, param: str, on_begin: Callable[[], None]
    ) -> MediaAnswer:
        """Asks a helper of the pool, and ends it if it has become large."""
        async with self._pool.helper(num_bytes // _BYTES_PER_TICKET, current_owner()) as helper:
            on_begin()
            answer = await self._ask_helper(helper, question, param)
            if answer.is_large:
                helper.kill()
        return answer

    async def _ask_helper(self, helper: Helper[MediaAnswer], question: MediaQuestion, param: str) -> MediaAnswer:
        try:
            async with asyncio.timeout(self._backstop_seconds):
                return await helper.ask(question)
        except TimeoutError:
            raise UnavailableError(
                f"{param} was not decoded within {self._backstop_seconds:g} s, because the server's host is too busy; "
                "send the request again later.",
                retry_after_seconds=RETRY_SECONDS,
            ) from None
        except OutOfTime:
            message = f"takes more than {self._limit_cpu_seconds:g} s of processor time to decode"
        except HelperKilled:
            raise
        except HelperDied:
            message = f"takes more than {self._limit_bytes} bytes of memory to decode, or crashes its decoder"
        logger.warning("%s %s; the helper that decoded it has ended", param, message)
        raise ParameterError(f"{param} {message}; send a smaller file.", param=param) from None

    @property
    def helper_pids(self) -> list[int]:
        """Process ids of the helpers, busy or idle."""
        return self._pool.pids

    def close(self) -> None:
        """Ends the helpers."""
        self._pool.close()
