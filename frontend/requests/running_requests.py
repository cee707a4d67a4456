"""The requests that the engine works on: opens them with a read prompt, keeps them by id, and aborts them."""

import asyncio
import functools
import time
from collections.abc import Collection, Iterable

from msgspec.structs import replace

from quire.core.engine.client import EngineClient
from quire.core.errors import ParameterError
from quire.core.logging import get_logger
from quire.core.wire.pooling import Pooling
from quire.core.wire.pooling_params import PoolingParams
from quire.core.wire.protocol import EngineRequest
from quire.core.wire.request_ids import reply_id_of
from quire.frontend.checkpoint.served_model import ServedModel
from quire.frontend.grammar.compiler import GrammarCompiler
from quire.frontend.grammar.output_length import check_min_tokens
from quire.frontend.keys.caller import Caller, current_owner
from quire.frontend.metrics.metrics import Metrics
from quire.frontend.requests.chunked_vectors import ChunkedVectors
from quire.frontend.requests.completion import Completion
from quire.frontend.requests.deadline import Deadline
from quire.frontend.requests.pooling_stream import PoolingStream
from quire.frontend.requests.prompt import Prompt
from quire.frontend.requests.request_builder import RequestBuilder, build_vector_request
from quire.frontend.requests.request_log import LoggedStream, RequestLog
from quire.frontend.requests.request_stream import RequestStream
from quire.frontend.requests.submission import AnyParams, ResolvedSubmission, Submission
from quire.frontend.requests.time_slices import in_time_slices
from quire.frontend.requests.usage import CALL_USAGE, CallUsage
from quire.frontend.text.tokenizer import Tokenizer

logger = get_logger(__name__)


class RunningRequests:
    """Hands requests to the engine and keeps their streams until they end.

    Args:
        client: the engine.
        builder: makes the engine's requests.
        grammars: compiles the constraints on outputs.
        model: has the number of tokens between two outputs of a stream.
        tokenizer: None for outputs without text.
        takes_priority: the engine runs requests by priority.
        metrics: counts requests; None counts nothing.
    """

    def __init__(
        self,
        client: EngineClient,
        builder: RequestBuilder,
        grammars: GrammarCompiler,
        model: ServedModel,
        tokenizer: Tokenizer | None,
        *,
        takes_priority: bool,
        metrics: Metrics | None,
    ) -> None:
        self._client = client
        self._builder = builder
        self._grammars = grammars
        self._model = model
        self._tokenizer = tokenizer
        self._takes_priority = takes_priority
        self._metrics = metrics
        self._streams: dict[str, RequestStream | PoolingStream | ChunkedVectors] = {}
        self._owners: dict[str, str] = {}  # the names of the keys that asked, by stream
        self._timers: dict[str, asyncio.TimerHandle] = {}  # of requests with a deadline

    def __len__(self) -> int:
        return len(self._streams)

    async def open_stream(
        self,
        submission: ResolvedSubmission,
        *,
        limit_logprobs: bool = True,
        heeds_rules: bool = True,
        log: RequestLog | None = None,
        engine: int | None = None,
    ) -> RequestStream:
        """Hands a request to the engine, all its n sequences.

        Args:
            submission: read and checked.
            limit_logprobs: refuse more logprobs than the server allows.
            heeds_rules: as for `RequestBuilder.build`.
            log: logs the request; None logs nothing.
            engine: the index of the engine for the request; None lets the router choose.

        Raises:
            ParameterError: a parameter is wrong, by name.
            EngineError: the engine cannot take requests.
        """
        sampling = submission.params
        if log is not None:
            log.add(submission.request_id, submission.prompt, sampling)
        constraint = sampling.structured_outputs
        grammar = None
        if constraint is not None:
            check_min_tokens(constraint, sampling.min_tokens)
            grammar = await self._grammars.compile(constraint)
        submission = self._heed_priority(submission)
        request = await self._builder.build(
            submission, limit_logprobs=limit_logprobs, grammar=grammar, heeds_rules=heeds_rules
        )
        return await self._submit(submission, request, log, engine)

    async def _submit(
        self, submission: ResolvedSubmission, request: EngineRequest, log: RequestLog | None, engine: int | None
    ) -> RequestStream:
        """Hands the engine a request. Thousands of sequences are opened in turns: other requests do not wait."""
        prompt, sampling, request_id = submission.prompt, submission.params, submission.request_id
        interval = max(self._model.stream_interval, sampling.stream_interval or 1)
        num_virtual = submission.num_before
        completions = [
            Completion(index, start.request_id, prompt.token_ids, sampling, self._tokenizer, interval, num_virtual)
            async for index, start in in_time_slices(enumerate(request.sequences))
        ]
        make = RequestStream if log is None or not log.outputs else functools.partial(LoggedStream, log)
        stream = make(
            request_id,
            prompt,
            sampling,
            completions,
            metrics=None if self._metrics is None else self._metrics.requests[0],
            abort=self._client.abort,
            on_close=functools.partial(self._on_closed, log, CALL_USAGE.get(), submission.caller),
            arrival_time=submission.arrival_time,
            lora_request=submission.lora_request,
        )
        self._add(stream, submission)
        try:
            engine = self._client.submit(request, stream.on_deltas, engine=engine)
        except BaseException:
            stream.close()
            raise
        if self._metrics is not None:
            stream.count_by(self._metrics.requests[engine])
        return stream

    async def open_vectors(
        self,
        submission: Submission[Prompt, PoolingParams],
        pooling: Pooling,
        *,
        log: RequestLog | None = None,
        engine: int | None = None,
    ) -> PoolingStream:
        """Hands a request for vectors to the engine.

        Args:
            submission: read and checked.
            pooling: what it wants, in the workers' form.
            log, engine: as for `open_stream`.

        Raises:
            ParameterError: the id is in use.
            EngineError: the engine cannot take requests.
        """
        submission = self._heed_priority(submission)
        prompt, request_id = submission.prompt, submission.request_id
        if log is not None:
            log.add(request_id, prompt, submission.params)
        stream = PoolingStream(
            request_id,
            prompt,
            pooling,
            metrics=None if self._metrics is None else self._metrics.requests[0],
            abort=self._client.abort,
            on_close=functools.partial(self._on_closed, log, CALL_USAGE.get(), submission.caller),
            arrival_time=submission.arrival_time,
        )
        request = build_vector_request(submission, pooling)
        self._add(stream, submission)
        try:
            engine = self._client.submit(request, [stream.on_delta], engine=engine)
        except BaseException:
            stream.close()
            raise
        if self._metrics is not None:
            stream.count_by(self._metrics.requests[engine])
        return stream

    async def open_long_vectors(
        self,
        submission: Submission[Prompt, PoolingParams],
        pooling: Pooling,
        length: int,
        *,
        log: RequestLog | None = None,
        engine: int | None = None,
    ) -> ChunkedVectors:
        """Hands a request for the vector of a long prompt to the engine, in parts of `length` tokens.

        Other arguments and errors are those of `open_vectors`.
        """
        prompt, request_id = submission.prompt, submission.request_id
        raw, lead = replace(pooling, activation=False, dimensions=None), pooling.num_lead_tokens
        whole = ChunkedVectors(request_id, prompt, pooling, self._on_whole_closed)
        self._add(whole, replace(submission, deadline=None))  # its parts have the deadline
        try:
            for number, start in enumerate(range(0, len(prompt.token_ids), length)):
                part = replace(
                    submission,
                    prompt=prompt._replace(text=None, token_ids=prompt.token_ids[start : start + length]),
                    request_id=f"{request_id}-{number}",
                    adapter_start=max(0, submission.adapter_start - start),
                )
                left_out = min(max(lead - start, 0), len(part.prompt.token_ids))
                wanted = replace(raw, num_lead_tokens=left_out)
                whole.add(await self.open_vectors(part, wanted, log=log, engine=engine), left_out)
        except BaseException:
            whole.close()
            raise
        return whole

    def _on_whole_closed(self, whole: ChunkedVectors) -> None:
        self._forget(whole.request_id)

    def _heed_priority(self, submission: "Submission[Prompt, AnyParams]") -> "Submission[Prompt, AnyParams]":
        """The submission, without a priority where the engine heeds none."""
        if not submission.priority or self._takes_priority:
            return submission
        _say_once_that_priority_is_idle()
        return replace(submission, priority=0)

    def _add(
        self, stream: RequestStream | PoolingStream | ChunkedVectors, submission: "Submission[Prompt, AnyParams]"
    ) -> None:
        """Keeps a stream. Raises ParameterError, or DeadlineError when its time is over already."""
        if stream.request_id in self._streams:
            raise ParameterError(
                f"request_id {stream.request_id!r} is in use by a running request.", param="request_id"
            )
        if (deadline := submission.deadline) is not None:
            deadline.check()
            delay, loop = deadline.at - time.monotonic(), asyncio.get_running_loop()
            self._timers[stream.request_id] = loop.call_later(delay, self._expire, stream.request_id, deadline)
        self._streams[stream.request_id] = stream
        self._owners[stream.request_id] = submission.tenant.name

    def _forget(self, request_id: str) -> None:
        self._streams.pop(request_id, None)
        self._owners.pop(request_id, None)

    def _expire(self, request_id: str, deadline: Deadline) -> None:
        """Ends a request whose time is over; the engine frees what it holds within a step."""
        stream = self._streams.get(request_id)
        if isinstance(stream, RequestStream | PoolingStream):
            stream.expire(deadline.error())

    def _on_closed(
        self,
        log: RequestLog | None,
        usage: CallUsage | None,
        caller: Caller | None,
        stream: RequestStream | PoolingStream,
    ) -> None:
        self._forget(stream.request_id)
        if (timer := self._timers.pop(stream.request_id, None)) is not None:
            timer.cancel()
        if usage is not None:
            usage.add(stream.usage())
        if caller is not None:
            caller.add_output(stream.usage().num_output_tokens)
        if log is not None:
            log.add_summary(stream)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests: their readers get a last output with finish_reason "abort". Unknown ids are ignored."""
        for request_id in request_ids:
            stream = self._streams.get(request_id)
            if stream is not None:
                stream.abort()

    def abort_replies(self, reply_ids: Collection[str]) -> None:
        """As `abort`, for all requests whose answers have these ids, those of other frontends of the engine included.

        Those from here end at once, even where the engine is only starting. Requests of other keys than the caller's go
        on.
        """
        owner = current_owner()
        found = [request_id for request_id in self._streams if reply_id_of(request_id) in reply_ids]
        self.abort([request_id for request_id in found if self._owners[request_id] == owner])
        self._client.abort_replies(list(reply_ids), owner)

    def close(self) -> None:
        """Aborts all requests and ends the compiling of grammars."""
        self.abort(list(self._streams))
        self._grammars.close()


@functools.cache
def _say_once_that_priority_is_idle() -> None:
    logger.warning("priority of requests changes nothing: they run first come; --scheduling-policy priority heeds it")
