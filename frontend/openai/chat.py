"""POST /v1/chat/completions: a conversation in, messages out, whole or as a stream of events."""

from collections.abc import AsyncGenerator

import msgspec
from msgspec import UNSET

from quire.core.errors import ParameterError
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.event_stream import DONE
from quire.frontend.openai.answers import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    Usage,
)
from quire.frontend.openai.generation import Reply, TextEvent, choose_id, engine_id, event, log_prompt
from quire.frontend.openai.logprobs import LogprobFormatter
from quire.frontend.openai.models import ServedModels
from quire.frontend.openai.schema import ChatRequest
from quire.frontend.output_processor import RequestStream
from quire.frontend.outputs import CompletionOutput, RequestOutput
from quire.frontend.server_config import ServerConfig


class ChatCompletions:
    """Answers chat requests; needs no HTTP, so that the batch runner uses it too."""

    def __init__(self, engine: AsyncLLM, server: ServerConfig, models: ServedModels) -> None:
        self._engine = engine
        self._server = server
        self._models = models
        self._template = server.read_chat_template()
        self._encoder = msgspec.json.Encoder()

    async def complete(self, request: ChatRequest, header_id: str | None = None) -> ChatCompletion:
        """The whole answer; cancelling aborts it in the engine.

        Raises:
            RequestError: the request cannot be served as asked.
            EngineError: the engine failed.
        """
        reply = self._reply(request, header_id)
        stream = await self._open(request, reply.id)
        try:
            async for output in stream:
                last = output
        finally:
            stream.close()
        return self._answer(request, reply, last)

    async def stream(self, request: ChatRequest, header_id: str | None = None) -> AsyncGenerator[bytes, None]:
        """The answer as events; closing the generator aborts it in the engine. Errors as for `complete`."""
        reply = self._reply(request, header_id)
        stream = await self._open(request, reply.id)
        try:
            chunks = _Chunks(request, reply, self._role(request), self._formatter(request), self._encoder)
            async for output in stream:
                frame = chunks.add(output)
                if output.finished:  # one write for the last text and the end
                    frame += chunks.end()
                if frame:
                    yield frame
        finally:
            stream.close()

    # ----------------------------------------------------------------------------------------------------- requests

    def _reply(self, request: ChatRequest, header_id: str | None) -> Reply:
        request.check()
        self._models.check(request.model)
        return Reply.to(request, choose_id("chatcmpl", request, header_id), self._models.name, self._server)

    async def _open(self, request: ChatRequest, reply_id: str) -> RequestStream:
        processor = self._engine.input_processor
        text = processor.render_chat(
            request.messages,
            tools=request.tools,
            documents=request.documents,
            add_generation_prompt=request.add_generation_prompt is not False,
            continue_final_message=bool(request.continue_final_message),
            chat_template=self._template,
            content_format=self._server.chat_template_content_format,
            chat_template_kwargs={
                **(self._server.default_chat_template_kwargs or {}),
                **(request.chat_template_kwargs or {}),
            },
        )
        token_ids = await processor.tokenize(text, add_special_tokens=bool(request.add_special_tokens))
        field, limit = request.token_limit
        defaults = processor.default_sampling
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        request_id = engine_id(reply_id)
        if self._engine.model.log_requests:
            log_prompt(request_id, text, self._server.max_log_len)
        try:
            return await self._engine.open(
                {"prompt": text, "prompt_token_ids": token_ids},
                request.make_sampling(
                    defaults,
                    max_tokens=limit if limit is not None else defaults.get("max_tokens"),
                    logprobs=logprobs,
                ),
                request_id,
                priority=request.priority or 0,
                cache_salt=request.cache_salt,
                fit_context=limit is None,
            )
        except ParameterError as error:
            renamed = {"max_tokens": field, "prompt": "messages", "logprobs": "top_logprobs"}
            message = str(error).replace("max_tokens", field)
            raise ParameterError(message, param=renamed.get(error.param or "", error.param)) from None

    def _role(self, request: ChatRequest) -> str:
        """Role of the answer; a message that is gone on with keeps its own."""
        if request.add_generation_prompt is not False:
            return self._server.response_role
        return str(request.messages[-1].get("role", self._server.response_role))

    def _formatter(self, request: ChatRequest) -> LogprobFormatter:
        as_ids = bool(request.return_tokens_as_token_ids)
        return LogprobFormatter(self._engine.tokenizer, request.top_logprobs or 0, as_ids=as_ids)

    # ------------------------------------------------------------------------------------------------------ answers

    def _answer(self, request: ChatRequest, reply: Reply, output: RequestOutput) -> ChatCompletion:
        formatter, role = self._formatter(request), self._role(request)
        choices = [
            ChatChoice(
                index=each.index,
                message=ChatMessage(role=role, content=each.text),
                logprobs=formatter.chat(each.logprobs) if each.logprobs is not None else None,
                finish_reason=each.finish_reason,
                stop_reason=each.stop_reason,
                token_ids=each.token_ids if request.return_token_ids else None,
            )
            for each in output.outputs
        ]
        num_tokens = sum(len(each.token_ids) for each in output.outputs)
        return ChatCompletion(
            id=reply.id,
            created=reply.created,
            model=reply.model,
            choices=choices,
            usage=reply.usage(len(output.prompt_token_ids), num_tokens, output.num_cached_tokens or 0),
            prompt_token_ids=output.prompt_token_ids if request.return_token_ids else None,
        )


class _Chunks:
    """Turns the outputs of one request into events, and counts tokens on the way."""

    def __init__(
        self,
        request: ChatRequest,
        reply: Reply,
        role: str,
        formatter: LogprobFormatter,
        encoder: msgspec.json.Encoder,
    ) -> None:
        self._reply = reply
        self._role = role
        self._formatter = formatter
        self._encoder = encoder
        self._return_token_ids = bool(request.return_token_ids)
        self._num_choices = request.n or 1
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._num_tokens = 0
        self._opened = False
        self._text_only = not self._return_token_ids and not reply.continuous_usage
        self._text_events: dict[int, TextEvent] = {}  # by choice

    def add(self, output: RequestOutput) -> bytes:
        """Events for what is new; empty when there is nothing to tell."""
        frames = [] if self._opened else self._open(output)
        for each in output.outputs:
            self._num_tokens += len(each.token_ids)
            if self._text_only and each.text and each.finish_reason is None and not each.logprobs:
                frames.append(self._text_event(each.index).fill(each.text))
            elif each.text or each.finish_reason or each.logprobs or (self._return_token_ids and each.token_ids):
                frames.append(self._frame([self._choice(each)]))
        return b"".join(frames)

    def end(self) -> bytes:
        """Usage, when asked for, and the end mark."""
        if not self._reply.include_usage:
            return DONE
        return self._frame([], usage=self._usage()) + DONE

    def _open(self, output: RequestOutput) -> list[bytes]:
        """One event per choice that tells the role."""
        self._opened = True
        self._prompt_tokens = len(output.prompt_token_ids)
        self._cached_tokens = output.num_cached_tokens or 0
        ids = output.prompt_token_ids if self._return_token_ids else UNSET
        delta = ChatDelta(role=self._role, content="")
        return [
            self._frame([ChatChunkChoice(index=index, delta=delta)], prompt_token_ids=ids)
            for index in range(self._num_choices)
        ]

    def _text_event(self, index: int) -> TextEvent:
        event = self._text_events.get(index)
        if event is None:
            empty = ChatChunkChoice(index=index, delta=ChatDelta(content=""))
            event = self._text_events[index] = TextEvent(self._frame([empty]), "content", self._encoder)
        return event

    def _choice(self, each: CompletionOutput) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=each.index,
            delta=ChatDelta(content=each.text),
            logprobs=self._formatter.chat(each.logprobs) if each.logprobs else None,
            finish_reason=each.finish_reason,
            stop_reason=each.stop_reason if each.finish_reason else UNSET,
            token_ids=each.token_ids if self._return_token_ids else UNSET,
        )

    def _frame(
        self,
        choices: list[ChatChunkChoice],
        *,
        usage: Usage | None = None,
        prompt_token_ids: list[int] | msgspec.UnsetType = UNSET,
    ) -> bytes:
        reply = self._reply
        if usage is None and reply.continuous_usage:
            usage = self._usage()
        chunk = ChatChunk(
            id=reply.id,
            created=reply.created,
            model=reply.model,
            choices=choices,
            usage=usage if reply.include_usage else UNSET,
            prompt_token_ids=prompt_token_ids,
        )
        return event(chunk, self._encoder)

    def _usage(self) -> Usage:
        return self._reply.usage(self._prompt_tokens, self._num_tokens, self._cached_tokens)
