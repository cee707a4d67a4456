"""Makes responses: reads the model's answer to its end, in the foreground or in the background."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from quire.core.errors import OverloadedError, QuireError, RequestError
from quire.core.logging import get_logger
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.chat.answer_events import Turn
from quire.frontend.http.errors import describe
from quire.frontend.http.server_state import ServerState
from quire.frontend.openai.logprobs import LogprobFormatter
from quire.frontend.openai.responses.answers import RawMessage, Response
from quire.frontend.openai.responses.background_responses import Making, Makings
from quire.frontend.openai.responses.conversations import KeptConversations
from quire.frontend.openai.responses.schema import ResponsesRequest
from quire.frontend.openai.responses.store import ResponseStore
from quire.frontend.openai.responses.stored import StoredResponse, new_version
from quire.frontend.openai.responses.streaming_events import ResponseBuilder
from quire.frontend.openai.responses.unread_events import StreamHistory
from quire.frontend.outputs import CompletionOutput
from quire.frontend.requests.prompt import Prompt

logger = get_logger(__name__)


class Job:
    """A response that is being made.

    Args:
        items: the request's own input.
        prompt: the model's input.

    Attributes:
        version: of its entry, from its beginning to its end.
        history: its stream, if it is made in the background with one.
    """

    def __init__(
        self,
        request: ResponsesRequest,
        builder: ResponseBuilder,
        turn: Turn,
        stored: StoredResponse,
        items: list[dict[str, Any]],
        prompt: Prompt,
    ) -> None:
        self.request = request
        self.builder = builder
        self.turn = turn
        self.stored = stored
        self.version = new_version()
        self.items = items
        self.prompt = prompt
        self.history: StreamHistory | None = None
        self._texts: list[str] = []
        self._token_ids: list[int] = []

    def note(self, output: CompletionOutput) -> None:
        """Records an unparsed output, for a request that asks for it and may see all of it."""
        if self.request.enable_response_messages and self.turn.shows_tokens:
            self._texts.append(output.text)
            self._token_ids += output.token_ids

    def add_messages(self) -> None:
        """Adds the model's input and output to the response, if the request asks for them."""
        if self.request.enable_response_messages:
            response, text = self.builder.response, "".join(self._texts)
            response.input_messages = [RawMessage(message=self.prompt.text or "", tokens=self.prompt.token_ids)]
            response.output_messages = [RawMessage(message=text, tokens=self._token_ids)] if self._token_ids else []


class Jobs:
    """Makes responses, and stores finished ones.

    Args:
        makings: the responses that are being made in the background.
        tokens_as_ids: log-probabilities name tokens by their ids.
        state: runs background work, so that a stopping server waits for it.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        store: ResponseStore,
        makings: Makings,
        kept: KeptConversations,
        state: ServerState,
        *,
        tokens_as_ids: bool,
    ) -> None:
        self._engine = engine
        self._store = store
        self._makings = makings
        self._kept = kept
        self._state = state
        self._tokens_as_ids = tokens_as_ids

    async def run(self, job: Job, *, is_begun: bool = False) -> AsyncGenerator[list[bytes], None]:
        """Reads the turn to its end; yields the frames of its stream, one list for each output.

        Args:
            is_begun: the first frames of the stream have been made.
        """
        builder, request = job.builder, job.request
        formatter = LogprobFormatter(self._engine.tokenizer, request.top_logprobs or 0, as_ids=self._tokens_as_ids)
        started, has_output, last = is_begun, False, None
        try:
            async for output, events in job.turn.events():
                if not started:
                    yield builder.start()
                    started = True
                has_output = True
                logprobs = formatter.chat(output.logprobs).content if output.logprobs else ()
                if _ends_by_token(output) and not request.include_stop_str_in_output:
                    logprobs = logprobs[:-1]  # that token is not part of the text
                job.note(output)
                if frames := builder.add(events, logprobs):
                    yield frames
        except Exception as error:  # also from the parsers of users
            if not request.background and not (request.stream and has_output):
                raise  # the answer has not begun: the error gets its own HTTP status, if no headers are sent yet
            logger.warning(
                "response %s failed: %s", builder.response.id, error, exc_info=not isinstance(error, QuireError)
            )
            last = [] if started else builder.start()
            last += builder.fail(_failure_code(error), describe(error).message)
        finally:
            job.turn.close()
        job.add_messages()
        last = last or [builder.end()]
        await self._keep(job, last)
        yield last

    async def start(self, job: Job) -> Response:
        """Makes the response in the background. Returns a copy of it as it is now: queued.

        Raises:
            ParameterError: its id is taken.
        """
        response, history = job.builder.response, StreamHistory() if job.request.stream else None
        response.status = "queued"
        queued = msgspec.structs.replace(response, output=[])
        job.history = history
        begun: asyncio.Future[QuireError | None] = asyncio.get_running_loop().create_future()
        task = self._state.start(self._make(job, begun))
        task.add_done_callback(lambda _: job.turn.close())  # also if it is cancelled before its first step
        self._makings.add(job.version, Making(response, history, task))
        either: list[asyncio.Future[Any]] = [begun, task]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        error = begun.result() if begun.done() else None
        try:
            if error is not None:
                raise error
            return queued
        finally:
            del begun, either, error  # which has this frame in its traceback: the cycle would hold the body

    async def _make(self, job: Job, begun: asyncio.Future[QuireError | None]) -> None:
        """Makes a response in the background.

        This task stores the entry. So the entry is completed even if the client disconnects, and a request that finds
        the entry can cancel the task, which has begun.

        Args:
            begun: gets None once the entry is stored, or the error.
        """
        response, history = job.builder.response, job.history
        groups = self.run(job)
        try:
            begun.set_result(error := await self._put_queued(job))
            if error is not None:
                return
            async for frames in groups:
                if history is not None:
                    history.add(frames)
        except asyncio.CancelledError:
            if response.status != "cancelled":
                job.builder.fail("server_error", "The server was stopped.")
            await self._keep(job, [])
            raise
        finally:
            await groups.aclose()
            if history is not None:
                history.end()

    async def _put_queued(self, job: Job) -> QuireError | None:
        """Stores the entry of a new response; returns the error if it cannot begin."""
        events = None if job.history is None else ()
        try:
            await self._store.put_new(job.stored.entry(job.version, events=events, maker=self._store.server))
        except QuireError as error:
            return error
        return None

    async def _keep(self, job: Job, last: list[bytes]) -> None:
        """Stores a finished response before the client reads `last`, its stream's last frames. The client may continue
        the response at once, at any server.

        Raises:
            ParameterError: another response took the id while this one was made in the foreground.
        """
        response = job.builder.response
        output = msgspec.to_builtins(response.output)
        if job.request.is_stored and self._store.keeps_any:
            stored = msgspec.structs.replace(job.stored, items=job.stored.items + output)
            events = None if job.history is None else [*job.history.frames, *last]
            entry = stored.entry(job.version, events=events)
            if job.request.background:
                await self._store.put(entry, replaces=job.version)
            else:
                await self._store.put_new(entry)
        if response.conversation is not None and response.status in ("completed", "incomplete"):
            await self._kept.extend(response.conversation.id, job.items + output)


def _failure_code(error: Exception) -> str:
    if isinstance(error, OverloadedError):
        return "rate_limit_exceeded"
    return "invalid_prompt" if isinstance(error, RequestError) else "server_error"


def _ends_by_token(output: CompletionOutput) -> bool:
    """True if the output's last token ended the answer."""
    return output.finish_reason == "stop" and not isinstance(output.stop_reason, str)
