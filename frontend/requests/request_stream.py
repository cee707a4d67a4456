"""Collects the engine's deltas for one request, and hands their reader outputs: text, log-probabilities, ends, times.

A slow reader gets several steps merged into one output, so outputs never pile up and the engine never waits.
"""

import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Self

from quire.core.errors import OverloadedError, QuireError, TokenizerError
from quire.core.logging import get_logger
from quire.core.wire import row_outputs
from quire.core.wire.protocol import FinishReason, RequestDelta
from quire.core.wire.sampling_params import RequestOutputKind, SamplingParams
from quire.frontend.checkpoint.adapters import LoRARequest
from quire.frontend.metrics.request_metrics import FinishedRequest, RequestMetrics
from quire.frontend.outputs import FlatLogprobs, PromptLogprobs, RequestOutput, RequestTimes
from quire.frontend.requests.completion import Completion, Watch
from quire.frontend.requests.failures import error_of
from quire.frontend.requests.prompt import Prompt
from quire.frontend.requests.token_logprobs import PromptRows
from quire.frontend.requests.usage import StreamUsage

if TYPE_CHECKING:
    import numpy as np

logger = get_logger(__name__)


class RequestStream:
    """The outputs of one request, as an asynchronous iterator. Use on one event loop; `close` aborts the request.

    Args:
        completions: one for each of the n sequences, in order.
        metrics: counts the request; None counts nothing. `count_by` may replace it later.
        abort: tells the engine to forget requests, by id.
        on_close: called once, when no more deltas will come.
        arrival_time: Unix seconds, from which latencies count; None for now.
        lora_request: the adapter that a program gave, for outputs to show.
    """

    __slots__ = (
        *("request_id", "_prompt", "_sampling", "_metrics", "_abort_in_engine", "_on_close", "_arrived_at"),
        *("_arrival_time", "_finished_at", "_error", "_loop", "_has_news", "_reader", "_only_news", "_only_last"),
        *("_done", "_completions", "_num_unfinished", "_prompt_rows", "_may_report", "_unread", "_lora_request"),
    )

    def __init__(
        self,
        request_id: str,
        prompt: Prompt,
        sampling: SamplingParams,
        completions: Sequence[Completion],
        *,
        metrics: RequestMetrics | None,
        abort: Callable[[list[str]], None],
        on_close: Callable[["RequestStream"], None],
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
    ) -> None:
        self.request_id = request_id
        self._prompt = prompt
        self._sampling = sampling
        self._lora_request = lora_request
        self._metrics = metrics
        self._abort_in_engine = abort
        self._on_close = on_close
        self._arrived_at, self._arrival_time = time.monotonic(), time.time()
        if arrival_time is not None:
            self._arrived_at -= self._arrival_time - arrival_time
            self._arrival_time = arrival_time
        self._finished_at: float | None = None
        self._error: QuireError | None = None
        self._loop = asyncio.get_running_loop()
        self._has_news = False
        self._reader: asyncio.Future[None] | None = None  # a reader that waits for the next output
        self._only_news = sampling.output_kind is RequestOutputKind.DELTA
        self._only_last = sampling.output_kind is RequestOutputKind.FINAL_ONLY
        self._done = False  # the reader has taken the last output
        self._unread: RequestOutput | None = None  # came before the error, which the reader gets next
        self._completions = list(completions)
        self._num_unfinished = len(self._completions)
        self._prompt_rows: PromptRows | None = None
        if sampling.scores_prompt:
            num_named = max(map(len, sampling.prompt_logprob_token_ids or [[]]))
            self._prompt_rows = PromptRows(prompt.token_ids, self._completions[0].text_tokenizer, num_named)
        # True if a reader may take outputs before the end: the prompt's log-probabilities come first.
        self._may_report = not self._only_last and (self._prompt_rows is None or self._prompt_rows.complete)

    def count_by(self, metrics: RequestMetrics | None) -> None:
        """Names the metrics of the engine that has the request; see `metrics`."""
        self._metrics = metrics

    @property
    def on_deltas(self) -> list[Callable[[RequestDelta], None]]:
        """For each sequence, in order, the function that takes its deltas."""
        return [functools.partial(self._on_delta, each) for each in self._completions]

    def watch(self, index: int, watch: Watch) -> None:
        """Lets `watch` end one sequence as a stop string would. Call before the engine's first delta."""
        self._completions[index].watch(watch)

    @property
    def finished(self) -> bool:
        return self._finished_at is not None

    # ------------------------------------------------------------------------------------------------ engine's side

    def _on_delta(self, completion: Completion, delta: RequestDelta) -> None:
        if completion.finish_reason is not None or self._finished_at is not None:
            return
        if delta.failure is not None:
            if delta.failure.kind != "dead_end":
                self._fail(error_of(delta.failure, self._metrics))
                return
            logger.warning("the output of request %s ends early: %s", self.request_id, delta.failure.message)
        if delta.output is not None:
            assert isinstance(delta.output, row_outputs.PromptLogprobs), "the frontend asks for no other"
            assert self._prompt_rows is not None
            self._prompt_rows.add(delta.output)
            self._may_report = self._prompt_rows.complete and not self._only_last
            if self._may_report and any(each.has_news for each in self._completions):
                self._wake()  # another sequence had news first
            return
        before = completion.num_tokens
        try:
            completion.add(delta)
        except TokenizerError as error:  # this request's tokens have no text; others may
            self._fail(error)
            return
        now = time.monotonic()
        if completion.num_tokens > before:
            self._count_tokens(completion, completion.num_tokens - before, now)
        if completion.finish_reason is not None:
            if delta.finish_reason is None:  # a stop string or a watch, which the engine does not see
                self._abort_in_engine([completion.request_id])
            self._count_finished(completion, now)
            self._num_unfinished -= 1
            if not self._num_unfinished:
                self._finish(now)
        if self._finished_at is not None or (completion.has_news and self._may_report):
            self._wake()

    def _fail(self, error: QuireError) -> None:
        if self._has_news and self._only_news:
            self._unread = self._take()
        self._error = error
        self._end_early(FinishReason.ERROR)

    def expire(self, error: QuireError) -> None:
        """Ends the request now: the reader gets what came before, then `error`."""
        if not self.finished:
            self._fail(error)

    def abort(self) -> None:
        """Ends the request now: the reader gets a last output with finish_reason "abort"."""
        if not self.finished:
            self._end_early(FinishReason.ABORT)

    def _end_early(self, reason: FinishReason) -> None:
        now = time.monotonic()
        unfinished = [each for each in self._completions if each.finish_reason is None]
        self._abort_in_engine([each.request_id for each in unfinished])
        for each in unfinished:
            each.finish_reason = reason
            each.has_news = True
            if not isinstance(self._error, OverloadedError):  # never admitted: counted as rejected already
                self._count_finished(each, now)
        self._finish(now)
        self._wake()

    def _finish(self, now: float) -> None:
        self._finished_at = now
        if self._metrics is not None and self._error is None:
            longest = max(each.num_tokens for each in self._completions)
            self._metrics.on_params(self._sampling.n, self._sampling.max_tokens, longest)
        self._on_close(self)

    def _count_tokens(self, completion: Completion, count: int, now: float) -> None:
        last, completion.last_token_at = completion.last_token_at, now
        if not last:
            completion.first_token_at = now
        if self._metrics is None:
            return
        if last:
            self._metrics.on_tokens(count, now - last)
        else:
            num_prompt_tokens = self._prompt.num_tokens
            seconds = now - self._arrived_at
            self._metrics.on_first_tokens(count, seconds, num_prompt_tokens, completion.num_cached_tokens)

    def _count_finished(self, completion: Completion, now: float) -> None:
        if self._metrics is None or completion.finish_reason is None:
            return
        self._metrics.on_request_finished(
            FinishedRequest(
                finish_reason=completion.finish_reason,
                num_prompt_tokens=self._prompt.num_tokens,
                num_generation_tokens=completion.num_tokens,
                num_cached_tokens=completion.num_cached_tokens,
                arrived_at=self._arrived_at,
                queued_at=completion.queued_at,
                scheduled_at=completion.scheduled_at,
                first_token_at=completion.first_token_at,
                last_token_at=completion.last_token_at,
                finished_at=now,
                num_preemptions=completion.num_preemptions,
            )
        )

    # ------------------------------------------------------------------------------------------------ reader's side

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        """The next output: everything that arrived since the one before.

        Raises, after everything that arrived before:
            ParameterError: the engine refused the request.
            OverloadedError: the engine's waiting queue is full.
            EngineError: the engine failed while it held the request.
        """
        if self._done:
            raise StopAsyncIteration
        if not self._has_news:
            self._reader = self._loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        self._has_news = False
        self._done = self._finished_at is not None
        if self._error is not None:
            return self._last_before_error()
        return self._take()

    def _last_before_error(self) -> RequestOutput:
        """The output that a slow reader has not taken before the request failed; raises the error where there is none.

        So a stream yields the same tokens before its error, however slow its reader is. An error's traceback leads here
        and to the prompt: once the error is raised, nothing here refers to it.
        """
        if self._unread is None:
            assert self._error is not None
            try:
                raise self._error
            finally:
                self._error = None
        unread, self._unread = self._unread, None
        self._done, self._has_news = False, True
        return unread

    def _wake(self) -> None:
        """Like `asyncio.Event.set` for one reader, but does not look up the running loop for every token."""
        self._has_news = True
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def close(self) -> None:
        """Aborts the unfinished sequences, because the reader is gone. Harmless at the end."""
        self._done = True
        self.abort()

    def _take(self) -> RequestOutput:
        everything = not self._only_news
        encoder = self._prompt.encoder
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt.text,
            prompt_token_ids=self._prompt.token_ids,
            outputs=[each.take_output() for each in self._completions if each.has_news or everything],
            finished=self._done,
            prompt_logprobs=None if self._prompt_rows is None else self._prompt_logprobs(self._prompt_rows),
            prompt_token_id_logprobs=None if self._prompt_rows is None else self._named_logprobs(self._prompt_rows),
            num_cached_tokens=self._completions[0].num_cached_tokens,
            metrics=self._times() if everything or self._done else None,
            lora_request=self._lora_request,
            encoder_prompt=None if encoder is None else encoder.text,
            encoder_prompt_token_ids=None if encoder is None else encoder.token_ids,
        )

    def _prompt_logprobs(self, found: PromptRows) -> PromptLogprobs | None:
        if self._sampling.prompt_logprobs is None:
            return None
        return FlatLogprobs.of(found.rows) if self._sampling.flat_logprobs else found.rows

    def _named_logprobs(self, found: PromptRows) -> "np.ndarray | None":
        if self._sampling.prompt_logprob_token_ids is None or not found.complete:  # the request was aborted
            return None
        import numpy as np  # imported here, because most servers do without

        return np.array(found.named[self._sampling.prompt_logprob_start or 0 :], np.float32)

    def _times(self) -> RequestTimes:
        def earliest(times: list[float]) -> float | None:
            return min((seconds for seconds in times if seconds), default=None)

        queued = earliest([each.queued_at for each in self._completions])
        scheduled = earliest([each.scheduled_at for each in self._completions])
        first = earliest([each.first_token_at for each in self._completions])
        return RequestTimes(
            arrival_time=self._arrival_time,
            queued_time=queued,
            first_scheduled_time=scheduled,
            first_token_time=first,
            last_token_time=max(each.last_token_at for each in self._completions) or None,
            finished_time=self._finished_at,
            time_in_queue=scheduled - queued if scheduled and queued else None,
            first_token_latency=first - self._arrived_at if first else None,
            num_generation_tokens=sum(each.num_tokens for each in self._completions),
            num_preemptions=sum(each.num_preemptions for each in self._completions),
        )

    def usage(self) -> StreamUsage:
        """The tokens so far."""
        return StreamUsage(
            len(self._prompt.token_ids),
            self._completions[0].num_cached_tokens,
            sum(each.num_tokens for each in self._completions),
            [str(each.finish_reason) for each in self._completions if each.finish_reason is not None],
        )

    def summary(self) -> str:
        """One line for the log."""
        times = self._times()
        reasons = ", ".join(dict.fromkeys(str(each.finish_reason) for each in self._completions))
        return (
            f"request {self.request_id}: {self._prompt.num_tokens} prompt tokens "
            f"({self._completions[0].num_cached_tokens} cached), {times.num_generation_tokens} output tokens, "
            f"{reasons}, {(self._finished_at or time.monotonic()) - self._arrived_at:.2f} s"
        )
