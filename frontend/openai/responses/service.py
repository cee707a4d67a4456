"""Creates responses, whole, as a stream or in the background, and finds stored ones."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any

import msgspec

from quire.core.errors import OverloadedError, ParameterError, QuireError, RequestError
from quire.core.logging import get_logger
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.chat.chat_input import ChatInput
from quire.frontend.chat.conversation import Conversations
from quire.frontend.chat.renaming import renamed
from quire.frontend.chat.turn import Turn
from quire.frontend.http.errors import describe
from quire.frontend.http.server_config import ServerConfig
from quire.frontend.http.server_state import ServerState
from quire.frontend.openai.logprobs import LogprobFormatter
from quire.frontend.openai.responses.answers import DeletedResponse, InputTokenCount, Response
from quire.frontend.openai.responses.builder import ResponseBuilder
from quire.frontend.openai.responses.input_items import ItemPage, item_page
from quire.frontend.openai.responses.items import encrypt, input_items, to_messages
from quire.frontend.openai.responses.schema import ENCRYPTED_REASONING, NAMES, ResponsesRequest
from quire.frontend.openai.responses.store import ResponseStore, StoredResponse, StreamHistory
from quire.frontend.openai.responses.tools import OfferedTools
from quire.frontend.openai.responses.truncation import fit
from quire.frontend.requests.ids import MAX_ID_CHARACTERS

logger = get_logger(__name__)


ACCEPTED: list[bytes] = []
"""The empty first item of a stream: headers are sent without waiting for an event."""


class _Job:
    """A response that is being made."""

    def __init__(self, request: ResponsesRequest, builder: ResponseBuilder, turn: Turn, stored: StoredResponse) -> None:
        self.request = request
        self.builder = builder
        self.turn = turn
        self.stored = stored


class Responses:
    """Answers the routes of the Responses API.

    Args:
        state: runs the responses that are made in the background, so that a stopping server waits for them.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        server: ServerConfig,
        conversations: Conversations,
        state: ServerState,
    ) -> None:
        self._engine = engine
        self._tokens_as_ids = server.return_tokens_as_token_ids
        self._conversations = conversations
        self._state = state
        self._store = ResponseStore(
            server.max_stored_responses, server.max_stored_response_bytes, server.max_stored_response_seconds
        )

    async def create(self, request: ResponsesRequest) -> Response:
        """The whole response; one in the background is returned at once, unfinished.

        Raises:
            RequestError: the request cannot be served as asked.
            EngineError: the engine failed.
        """
        job = await self._open(request)
        if request.background:
            self._start(job)
            return msgspec.structs.replace(job.builder.response, output=[])  # a copy: the response still changes
        async for _ in self._run(job):
            pass
        return job.builder.response

    async def stream(self, request: ResponsesRequest) -> AsyncGenerator[list[bytes], None]:
        """The response's events; each list holds those that come together. Closing the generator aborts the response,
        unless it is made in the background."""
        job = await self._open(request)
        if request.background:
            self._start(job)
            assert job.stored.history is not None
            async for frames in _follow(job.stored.history):
                yield frames
            return
        try:
            yield ACCEPTED
            async with aclosing(self._run(job)) as groups:
                async for frames in groups:
                    yield frames
        finally:
            job.turn.close()

    def retrieve(self, response_id: str) -> Response:
        """A stored response as it is now. Raises NotFoundError."""
        return self._store.get(response_id).response

    def follow(self, response_id: str, start: int) -> AsyncGenerator[list[bytes], None]:
        """The events of a response made in the background with `stream`, from number `start` on, as for `stream`.

        Raises:
            NotFoundError: there is no such response.
            ParameterError: its events are not kept.
        """
        history = self._store.get(response_id).history
        if history is None:
            raise ParameterError(
                "Only responses created with background=true and stream=true can be streamed again; leave stream out.",
                param="stream",
            )
        return _follow(history, start)

    def input_items(self, response_id: str, *, limit: int, after: str | None, newest_first: bool) -> ItemPage:
        """The items that a stored response answered. Raises NotFoundError and ParameterError."""
        return item_page(self._store.get(response_id), limit=limit, after=after, newest_first=newest_first)

    async def count_input(self, request: ResponsesRequest) -> InputTokenCount:
        """Tokens of the prompt that the request has. Raises RequestError."""
        request.check()
        self._engine.model.check_name(request.model)
        with renamed(**NAMES):
            _, chat, _ = self._read(request)
            prompt = await self._conversations.render(chat)
        return InputTokenCount(input_tokens=len(prompt.token_ids))

    async def cancel(self, response_id: str) -> Response:
        """Ends a response that is made in the background; a cancelled one stays as it is.

        Raises:
            NotFoundError: there is no such response.
            ParameterError: the response is not made in the background, or is finished.
        """
        stored = self._store.get(response_id)
        response = stored.response
        if not response.background:
            raise ParameterError("Only responses created with background=true can be cancelled.", param="response_id")
        if stored.is_running:
            assert stored.task is not None
            response.status = "cancelled"
            stored.task.cancel()
            await asyncio.wait([stored.task])
        if response.status != "cancelled":
            raise ParameterError(f"The response is {response.status}; there is nothing to cancel.", param="response_id")
        return response

    def delete(self, response_id: str) -> DeletedResponse:
        """Forgets a stored response. Raises NotFoundError."""
        self._store.delete(response_id)
        return DeletedResponse(id=response_id)

    # ------------------------------------------------------------------------------------------------------ requests

    async def _open(self, request: ResponsesRequest) -> _Job:
        """Checks the request and hands it to the engine."""
        request.check()
        self._engine.model.check_name(request.model)
        response_id = _response_id(request)
        self._store.check_new(response_id)
        if request.background and not self._store.keeps_any:
            raise ParameterError("background needs a server with --max-stored-responses above 0.", param="background")
        if request.background:
            self._store.check_room()
        with renamed(**NAMES):
            items, chat, tools = self._read(request)
            prompt = None
            if request.truncation == "auto":
                chat, prompt = await fit(
                    chat,
                    self._conversations,
                    max_model_len=self._engine.max_model_len,
                    max_text_length=self._engine.async_tokenizer.max_text_length,
                )
            turn = await self._conversations.open(chat, response_id, prompt=prompt)
        response = _new_response(request, response_id, self._engine.model.name, self._engine)
        builder = ResponseBuilder(response, tools, encrypt if request.includes(ENCRYPTED_REASONING) else None)
        history = StreamHistory() if request.background and request.stream else None
        return _Job(request, builder, turn, StoredResponse(response, items, history))

    def _read(self, request: ResponsesRequest) -> tuple[list[dict[str, Any]], ChatInput, OfferedTools]:
        """The whole conversation as items and as a ChatInput, and the request's tools."""
        items = list(input_items(request.input))
        previous = []
        if request.previous_response_id is not None:
            previous = self._previous_items(request.previous_response_id)
            items = previous + items
        tools = OfferedTools(request.tools)
        messages = to_messages(items, request.instructions, num_previous=len(previous))
        return items, request.to_chat_input(messages, tools), tools

    def _previous_items(self, response_id: str) -> list[dict[str, Any]]:
        stored = self._store.get(response_id, param="previous_response_id")
        if stored.response.status not in ("completed", "incomplete"):
            raise ParameterError(
                f"The previous response is {stored.response.status}; a conversation goes on from one that is "
                "completed or incomplete.",
                param="previous_response_id",
            )
        return stored.items

    # ------------------------------------------------------------------------------------------------------- answers

    async def _run(self, job: _Job) -> AsyncGenerator[list[bytes], None]:
        """Reads the turn to its end; yields the frames of its stream, those of one output together."""
        builder, request = job.builder, job.request
        formatter = LogprobFormatter(self._engine.tokenizer, request.top_logprobs or 0, as_ids=self._tokens_as_ids)
        started = failed = False
        try:
            async for output, events in job.turn.events():
                if not started:
                    yield builder.start()
                    started = True
                logprobs = formatter.chat(output.logprobs).content if output.logprobs else ()
                if frames := builder.add(events, logprobs):
                    yield frames
        except Exception as error:  # also from the parsers of users
            if not request.background and not (request.stream and started):
                raise  # nothing is sent yet: the error gets its own HTTP status
            failed = True
            logger.warning(
                "response %s failed: %s", builder.response.id, error, exc_info=not isinstance(error, QuireError)
            )
            yield ([] if started else builder.start()) + builder.fail(_failure_code(error), describe(error).message)
        finally:
            job.turn.close()
        if request.is_stored and self._store.keeps_any:
            job.stored.items = job.stored.items + msgspec.to_builtins(builder.response.output)
            self._store.put(job.stored)
        if not failed:
            yield [builder.end()]

    def _start(self, job: _Job) -> None:
        """Makes the response in the background."""
        job.builder.response.status = "queued"
        job.stored.task = self._state.start(self._record(job))
        self._store.put(job.stored)

    def _record(self, job: _Job) -> Coroutine[Any, Any, None]:
        async def record() -> None:
            response, history = job.builder.response, job.stored.history
            groups = self._run(job)
            try:
                async for frames in groups:
                    if history is not None:
                        history.add(frames)
            except asyncio.CancelledError:
                if response.status != "cancelled":
                    job.builder.fail("server_error", "The server was stopped.")
                raise
            finally:
                await groups.aclose()
                if history is not None:
                    history.end()

        return record()


async def _follow(history: StreamHistory, start: int = 0) -> AsyncGenerator[list[bytes], None]:
    """Events as they come, after an empty list, because the first event may take long."""
    yield ACCEPTED
    async with aclosing(history.follow(start)) as groups:
        async for frames in groups:
            yield frames


def _response_id(request: ResponsesRequest) -> str:
    """The client's id, or a fresh one that nobody can guess."""
    if request.request_id is None:
        return f"resp_{uuid.uuid4().hex}"
    return f"resp_{request.request_id.removeprefix('resp_')[:MAX_ID_CHARACTERS]}"


def _failure_code(error: Exception) -> str:
    if isinstance(error, OverloadedError):
        return "rate_limit_exceeded"
    return "invalid_prompt" if isinstance(error, RequestError) else "server_error"


def _new_response(request: ResponsesRequest, response_id: str, model: str, engine: AsyncLLM) -> Response:
    """The response's fields that are known before the model answers."""
    defaults = engine.sampling_input.defaults
    return Response(
        id=response_id,
        created_at=int(time.time()),
        background=bool(request.background),
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        model=model,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        reasoning=request.reasoning,
        store=request.is_stored,
        temperature=_given(request.temperature, defaults.get("temperature", 1.0)),
        text=request.text or {"format": {"type": "text"}},
        tool_choice=request.tool_choice or "auto",
        tools=request.tools or [],
        top_logprobs=request.top_logprobs or 0,
        top_p=_given(request.top_p, defaults.get("top_p", 1.0)),
        presence_penalty=_given(request.presence_penalty, defaults.get("presence_penalty", 0.0)),
        frequency_penalty=_given(request.frequency_penalty, defaults.get("frequency_penalty", 0.0)),
        truncation=request.truncation or "disabled",
        user=request.user,
        metadata=request.metadata or {},
    )


def _given(value: float | None, default: float) -> float:
    return default if value is None else value
