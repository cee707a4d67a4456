"""Creates responses, whole, as a stream or in the background, and finds stored ones."""

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing

from msgspec import UNSET

from quire.core.errors import ParameterError
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.chat.chat_input import ChatInput
from quire.frontend.chat.client_headers import ClientHeaders
from quire.frontend.chat.conversation import Conversations
from quire.frontend.chat.renaming import renamed
from quire.frontend.chat.rendered import RenderedRequest
from quire.frontend.openai.responses.answers import (
    DeletedResponse,
    InputTokenCount,
    Response,
    ResponseConversation,
)
from quire.frontend.openai.responses.bodies import InputTokensRequest
from quire.frontend.openai.responses.item_page import ItemPage, complete_item, item_page
from quire.frontend.openai.responses.items import encrypt
from quire.frontend.openai.responses.jobs import Job, Jobs
from quire.frontend.openai.responses.request_input import ReadRequest, RequestReader
from quire.frontend.openai.responses.schema import ENCRYPTED_REASONING, NAMES, ResponsesRequest
from quire.frontend.openai.responses.store import ResponseStore
from quire.frontend.openai.responses.stored import StoredResponse
from quire.frontend.openai.responses.streaming_events import ResponseBuilder
from quire.frontend.openai.responses.truncation import fit
from quire.frontend.requests.ids import MAX_ID_CHARACTERS
from quire.frontend.requests.prompt import Prompt


class Opening(list[bytes]):
    """Frames that open a stream after the engine has got the request, like `Accepted`."""


class Responses:
    """Answers the routes of the Responses API that create, retrieve and delete responses."""

    def __init__(
        self, engine: AsyncLLM, conversations: Conversations, store: ResponseStore, reader: RequestReader, jobs: Jobs
    ) -> None:
        self._engine = engine
        self._conversations = conversations
        self._store = store
        self._reader = reader
        self._jobs = jobs

    async def create(self, request: ResponsesRequest, headers: ClientHeaders = ClientHeaders()) -> Response:
        """The whole response; one in the background is returned at once, unfinished.

        Raises:
            RequestError: the request cannot be served as asked.
            EngineError: the engine failed.
        """
        job = await self._open(request, headers)
        if request.background:
            return await self._jobs.start(job)
        async for _ in self._jobs.run(job):
            pass
        return job.builder.response

    async def stream(
        self, request: ResponsesRequest, headers: ClientHeaders = ClientHeaders()
    ) -> AsyncGenerator[list[bytes], None]:
        """The response's events, in lists of simultaneous ones. Closing the generator aborts the response, unless it is
        made in the background."""
        job = await self._open(request, headers)
        if request.background:
            await self._jobs.start(job)
            async for frames in self.follow(job.builder.response.id):
                yield frames
            return
        try:
            yield Opening(job.builder.start())
            async with aclosing(self._jobs.run(job, is_begun=True)) as groups:
                async for frames in groups:
                    yield frames
        finally:
            job.turn.close()

    async def retrieve(self, response_id: str) -> Response:
        """A stored response as it is now. Raises NotFoundError."""
        return (await self._store.response(response_id)).response

    async def follow(self, response_id: str, start: int = 0) -> AsyncGenerator[list[bytes], None]:
        """The events of a response made in the background with `stream`, from number `start` on, as for `stream`.

        Raises:
            NotFoundError: there is no such response.
            ParameterError: its events are not kept.
            EngineError: its events are lost.
        """
        yield Opening()
        ended = False
        while not ended:
            events = await self._store.events(response_id, start)
            start, ended = start + len(events.frames), events.ended
            if events.frames:
                yield events.frames

    async def input_items(self, response_id: str, *, limit: int, after: str | None, newest_first: bool) -> ItemPage:
        """The items that a stored response answered. Raises NotFoundError and ParameterError."""
        stored, suffix = await self._store.response(response_id), response_id.removeprefix("resp_")
        answered = stored.items[: stored.num_input_items]
        items = [complete_item(item, f"{suffix}_{index}") for index, item in enumerate(answered)]
        return item_page(items, limit=limit, after=after, newest_first=newest_first)

    async def count_input(self, request: InputTokensRequest) -> InputTokenCount:
        """Tokens of the prompt that a response would have. Raises RequestError."""
        response = request.as_response()
        response.check()
        self._engine.model.choose(request.model)
        with renamed(**NAMES):
            prompt = await self._conversations.render((await self._reader.read(response)).chat)
        return InputTokenCount(input_tokens=len(prompt.token_ids))

    async def render(self, request: ResponsesRequest) -> RenderedRequest:
        """A response as a body of /inference/v1/generate. Raises RequestError."""
        request.check()
        self._engine.model.choose(request.model)
        with renamed(**NAMES):
            _, chat, prompt = await self._prompt(request)
            return await self._conversations.rendered(chat, prompt, _response_id(request), param="input")

    async def cancel(self, response_id: str) -> Response:
        """Ends a response that is made in the background; a cancelled one stays as it is.

        Raises:
            NotFoundError: there is no such response.
            ParameterError: the response is not made in the background, or is finished.
        """
        if not (await self._store.response(response_id)).response.background:
            raise ParameterError("Only responses created with background=true can be cancelled.", param="response_id")
        response = await self._store.cancel(response_id)
        if response.status != "cancelled":
            raise ParameterError(f"The response is {response.status}; there is nothing to cancel.", param="response_id")
        return response

    async def delete(self, response_id: str) -> DeletedResponse:
        """Forgets a stored response. Raises NotFoundError."""
        await self._store.response(response_id)
        await self._store.delete(response_id)
        return DeletedResponse(id=response_id)

    # ------------------------------------------------------------------------------------------------------ requests

    async def _prompt(self, request: ResponsesRequest) -> tuple[ReadRequest, ChatInput, Prompt]:
        """The conversation, shortened if the request allows it, and its prompt."""
        read = await self._reader.read(request)
        if request.truncation != "auto":
            return read, read.chat, await self._conversations.render(read.chat)
        chat, prompt = await fit(
            read.chat,
            self._conversations,
            max_model_len=self._engine.max_model_len,
            max_text_length=self._engine.async_tokenizer.max_text_length,
        )
        return read, chat, prompt

    async def _open(self, request: ResponsesRequest, headers: ClientHeaders) -> Job:
        """Checks the request and hands it to the engine."""
        request.check()
        self._engine.model.choose(request.model)
        self._engine.check_generates()
        response_id = _response_id(request)
        if request.request_id is not None:
            await self._store.check_new(response_id)
        if request.background and not self._store.keeps_any:
            raise ParameterError("background needs a server with --max-stored-responses above 0.", param="background")
        if request.background:
            await self._store.check_room()
        with renamed(**NAMES):
            read, chat, prompt = await self._prompt(request)
            turn = await self._conversations.open(chat, response_id, headers, prompt=prompt)
        response = _new_response(request, response_id, self._engine.model.chosen_name, self._engine)
        builder = ResponseBuilder(response, read.tools, encrypt if request.includes(ENCRYPTED_REASONING) else None)
        given = read.previous + read.items
        stored = StoredResponse(response=response, items=given, num_input_items=len(given))
        return Job(request, builder, turn, stored, read.items, prompt)


def _response_id(request: ResponsesRequest) -> str:
    """The client's id, or a fresh one that cannot be guessed."""
    if request.request_id is None:
        return f"resp_{uuid.uuid4().hex}"
    return f"resp_{request.request_id.removeprefix('resp_')[:MAX_ID_CHARACTERS]}"


def _new_response(request: ResponsesRequest, response_id: str, model: str, engine: AsyncLLM) -> Response:
    """The response's fields that are known before the model answers."""
    defaults = engine.sampling_input.defaults
    return Response(
        id=response_id,
        created_at=int(time.time()),
        background=bool(request.background),
        conversation=ResponseConversation(request.conversation_id) if request.conversation_id is not None else None,
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        model=model,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        prompt_cache_options=UNSET if request.prompt_cache_options is None else request.prompt_cache_options.applied(),
        prompt_cache_retention=_retention(request.prompt_cache_retention),
        reasoning=request.reasoning,
        safety_identifier=request.safety_identifier,
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


def _retention(asked: str | None) -> str | None:
    """`prompt_cache_retention` as responses spell it; older clients send "in-memory"."""
    return "in_memory" if asked == "in-memory" else asked


def _given(value: float | None, default: float) -> float:
    return default if value is None else value
