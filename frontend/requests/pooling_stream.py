"""Collects the engine's deltas for one request for vectors; its reader gets one output, at the end."""

import asyncio
import time
from collections.abc import Callable
from typing import Self

from quire.core.errors import EngineError, QuireError
from quire.core.wire.pooling import Pooling
from quire.core.wire.protocol import FinishReason, RequestDelta
from quire.core.wire.row_outputs import HiddenStates, PooledVector
from quire.frontend.metrics.request_metrics import FinishedRequest, RequestMetrics
from quire.frontend.outputs import LateChunk, LateChunkingMetadata, PoolingOutput, PoolingRequestOutput, RequestTimes
from quire.frontend.requests.failures import error_of
from quire.frontend.requests.prompt import Prompt
from quire.frontend.requests.usage import StreamUsage

VectorsOutput = PoolingRequestOutput[PoolingOutput]


class PoolingStream:
    """One request for vectors. Use on one event loop; `close` aborts it.

    Args:
        metrics: counts the request; None counts nothing. `count_by` may replace it later.
        abort: tells the engine to forget requests, by id.
        on_close: called once, when no more deltas will come.
        arrival_time: Unix seconds, from which latencies count; None for now.
    """

    def __init__(
        self,
        request_id: str,
        prompt: Prompt,
        pooling: Pooling,
        *,
        metrics: RequestMetrics | None,
        abort: Callable[[list[str]], None],
        on_close: Callable[["PoolingStream"], None],
        arrival_time: float | None = None,
    ) -> None:
        self.request_id = request_id
        self._prompt = prompt
        self._pooling = pooling
        self._metrics = metrics
        self._abort_in_engine = abort
        self._on_close = on_close
        self._arrived_at, self._arrival_time = time.monotonic(), time.time()
        if arrival_time is not None:
            self._arrived_at -= self._arrival_time - arrival_time
            self._arrival_time = arrival_time
        self._finished_at: float | None = None
        self._parts: list[HiddenStates] = []
        self._is_read = False
        self._output: asyncio.Future[VectorsOutput] = asyncio.get_running_loop().create_future()

    def count_by(self, metrics: RequestMetrics | None) -> None:
        """Names the metrics of the engine that has the request; see `metrics`."""
        self._metrics = metrics

    @property
    def finished(self) -> bool:
        return self._finished_at is not None

    # ------------------------------------------------------------------------------------------------ engine's side

    def on_delta(self, delta: RequestDelta) -> None:
        """Takes a delta; the last one has the output, or a part of it."""
        if self.finished:
            return
        if delta.failure is not None:
            error = error_of(delta.failure, self._metrics)
            self._finish(delta, FinishReason.ERROR, is_counted=delta.failure.kind != "overloaded")
            self._fail(error)
            return
        match delta.output:
            case PooledVector(values=values):
                self._succeed(delta, PoolingOutput(values, (len(values) // 4,)))
            case HiddenStates() as part:
                if not part.start:  # the first, or the prompt is computed again
                    self._parts.clear()
                self._parts.append(part)
                if delta.finish_reason is not None:
                    values = b"".join(each.values for each in self._parts)
                    width = part.width
                    count = len(values) // (4 * width) if width else 0
                    shape = (count,) if self._pooling.is_flat else (count, width)
                    self._succeed(delta, PoolingOutput(values, shape))

    def _succeed(self, delta: RequestDelta, output: PoolingOutput) -> None:
        if self._metrics is not None:
            self._metrics.on_prompt(len(self._prompt.token_ids), delta.num_cached_tokens)
        self._finish(delta, FinishReason.STOP)
        if not self._output.done():
            self._output.set_result(
                PoolingRequestOutput(
                    request_id=self.request_id,
                    outputs=output,
                    prompt_token_ids=self._prompt.token_ids,
                    num_cached_tokens=delta.num_cached_tokens,
                    late_chunking=self._late_chunking(),
                    metrics=self._times(delta),
                )
            )

    def _times(self, delta: RequestDelta) -> RequestTimes:
        queued, scheduled = delta.queued_at or None, delta.scheduled_at or None
        return RequestTimes(
            arrival_time=self._arrival_time,
            queued_time=queued,
            first_scheduled_time=scheduled,
            finished_time=self._finished_at,
            time_in_queue=scheduled - queued if scheduled and queued else None,
            num_preemptions=delta.num_preemptions,
        )

    def _late_chunking(self) -> LateChunkingMetadata | None:
        size, num_tokens = self._pooling.chunk_size, len(self._prompt.token_ids)
        if size is None:
            return None
        chunks = [LateChunk((start, min(start + size, num_tokens))) for start in range(0, num_tokens, size)]
        return LateChunkingMetadata(size, num_tokens, chunks)

    def _fail(self, error: QuireError) -> None:
        if not self._output.done():
            self._output.set_exception(error)
            self._output.exception()  # a reader that is gone does not miss it

    def _finish(self, delta: RequestDelta | None, reason: FinishReason, *, is_counted: bool = True) -> None:
        now = self._finished_at = time.monotonic()
        if self._metrics is not None and is_counted:
            self._metrics.on_request_finished(
                FinishedRequest(
                    finish_reason=reason,
                    num_prompt_tokens=len(self._prompt.token_ids),
                    num_generation_tokens=0,
                    num_cached_tokens=0 if delta is None else delta.num_cached_tokens,
                    arrived_at=self._arrived_at,
                    queued_at=0.0 if delta is None else delta.queued_at,
                    scheduled_at=0.0 if delta is None else delta.scheduled_at,
                    first_token_at=0.0,
                    last_token_at=0.0,
                    finished_at=now,
                    num_preemptions=0 if delta is None else delta.num_preemptions,
                )
            )
        self._on_close(self)

    def expire(self, error: QuireError) -> None:
        """Ends the request now: its reader gets `error`."""
        if not self.finished:
            self._abort_in_engine([self.request_id])
            self._finish(None, FinishReason.ABORT)
            self._fail(error)

    def abort(self) -> None:
        """Ends the request now: its reader gets an EngineError, because there is no part of a vector."""
        if not self.finished:
            self._abort_in_engine([self.request_id])
            self._finish(None, FinishReason.ABORT)
            self._fail(EngineError(f"Request {self.request_id} was aborted before its output was there."))

    # ------------------------------------------------------------------------------------------------ reader's side

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> VectorsOutput:
        """The output, once; raises as `output` does."""
        if self._is_read:
            raise StopAsyncIteration
        self._is_read = True
        return await self.output()

    async def output(self) -> VectorsOutput:
        """The output, once it is there.

        Raises:
            ParameterError: the engine refused the request.
            OverloadedError: the engine's waiting queue is full.
            EngineError: the engine failed while it held the request, or the request was aborted.
        """
        return await asyncio.shield(self._output)

    def close(self) -> None:
        """Aborts the request if it is unfinished, because the reader is gone. Harmless at the end."""
        self.abort()

    def usage(self) -> StreamUsage:
        """The tokens of the prompt; a vector has none of its own."""
        return StreamUsage(len(self._prompt.token_ids), 0, 0, [])

    def summary(self) -> str:
        """One line for the log."""
        seconds = (self._finished_at or time.monotonic()) - self._arrived_at
        return f"request {self.request_id}: {len(self._prompt.token_ids)} prompt tokens, a vector, {seconds:.2f} s"
