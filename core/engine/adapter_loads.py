"""Loads of adapters: sends the scheduler's loads to the workers, and reports to it when they end."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from quire.core.errors import EngineError, WorkerCallError
from quire.core.logging import get_logger
from quire.core.scheduling.adapter_slots import AdapterWait
from quire.core.scheduling.scheduler import Scheduler
from quire.core.wire.adapters import LATE_REMEDY, LOAD_ADAPTER, Adapter, LoadedAdapter
from quire.core.wire.protocol import RequestDelta
from quire.core.wire.row_outputs import RequestFailure

logger = get_logger(__name__)

_LATE_RETRY_SECONDS = 10.0  # in which storage may answer again

CallWorkers = Callable[[str, bytes], Awaitable[list[bytes]]]


class AdapterLoads:
    """The loads of adapters that run beside the steps. Use from one event loop.

    Args:
        scheduler: decides what is loaded.
        call: runs a `WorkerCall` on every worker.
        on_end: is given the last deltas of requests whose adapters cannot be used, after each load.
    """

    def __init__(self, scheduler: Scheduler, call: CallWorkers, on_end: Callable[[list[RequestDelta]], None]) -> None:
        self._scheduler = scheduler
        self._call = call
        self._on_end = on_end
        self._running: dict[AdapterWait, asyncio.Task[RequestFailure | EngineError | None]] = {}

    def start(self) -> None:
        """Starts the loads that have become necessary. Call it when all plans have been sent."""
        for wait in self._scheduler.take_adapter_loads():
            self._running[wait] = asyncio.create_task(self._load(wait))

    async def prepare(self, adapter: Adapter) -> RequestFailure | None:
        """Loads an adapter into the host's memory. Returns the reason why it cannot be used; None if it can.

        Raises EngineError if the engine ends meanwhile.
        """
        wait = self._scheduler.prefetch_adapter(adapter)
        self.start()
        end = await asyncio.shield(self._running[wait])
        if isinstance(end, EngineError):
            raise end
        return end

    async def _load(self, wait: AdapterWait) -> RequestFailure | EngineError | None:
        """Returns the reason why the adapter cannot be used, if any, or the error with which the engine ends."""
        assert wait.load is not None
        decoder = msgspec.msgpack.Decoder(LoadedAdapter)
        try:
            answers = await self._call(LOAD_ADAPTER, msgspec.msgpack.encode(wait.load))
            fault = _fault([decoder.decode(answer) for answer in answers])
        except WorkerCallError as error:
            fault = LoadedAdapter(str(error))
        except EngineError as error:  # the requests that wait are not at fault: the next engine gets them
            return error
        del self._running[wait]
        failure = None if fault is None else _failure(wait.load.adapter, fault)
        self._on_end(self._scheduler.on_adapter(wait, failure))
        return failure


def _failure(adapter: Adapter, fault: LoadedAdapter) -> RequestFailure:
    """Logs why an adapter cannot be used, and says it to the requests that wait for it."""
    why = fault.error or ""
    logger.warning("the adapter %s (%s) cannot be used: %s", adapter.name, adapter.path, why)
    why = _without_folder(why, adapter.path)
    if not fault.is_late:
        return RequestFailure("invalid", f"The adapter {adapter.name!r} cannot be used: {why}")
    message = f"The adapter {adapter.name!r} is not loaded: {why} {LATE_REMEDY}"
    return RequestFailure("unavailable", message, _LATE_RETRY_SECONDS)


def _without_folder(text: str, path: str) -> str:
    """`text` without an adapter's folder: where it is is the operator's to know, from the log."""
    return text.replace(f"{path}/", "").replace(path, "its folder") if path else text


def _fault(answers: Sequence[LoadedAdapter]) -> LoadedAdapter | None:
    """The reason why an adapter cannot be used, of all ranks' answers; one that stays comes before one that passes."""
    if errors := [answer for answer in answers if answer.error is not None]:
        return min(errors, key=lambda answer: answer.is_late)
    left_over = set(answers[0].left_over).intersection(*(answer.left_over for answer in answers))
    if not left_over:
        return None
    names, more = sorted(left_over)[:3], len(left_over) - 3
    rest = f" and {more} more" if more > 0 else ""
    return LoadedAdapter(f"its tensors {', '.join(names)}{rest} belong to no layer of the model that takes adapters.")
