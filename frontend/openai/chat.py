"""POST /v1/chat/completions: a conversation in, messages out, whole or as a stream of events."""

import functools
from collections.abc import AsyncGenerator

import msgspec

from quire.frontend.async_llm import AsyncLLM
from quire.frontend.chat.answer_events import Turn
from quire.frontend.chat.client_headers import ClientHeaders
from quire.frontend.chat.conversation import Conversations
from quire.frontend.http.event_stream import Accepted
from quire.frontend.http.server_config import ServerConfig
from quire.frontend.openai.answers import ChatChoice, ChatCompletion, ChatMessage, CompletionUsage
from quire.frontend.openai.chat_events import ChatChunks, finish_reason_of, read_message
from quire.frontend.openai.generation import INLINE_CHOICES, Replies, Reply
from quire.frontend.openai.logprobs import LogprobFormatter, prompt_logprobs
from quire.frontend.openai.schema import ChatRequest
from quire.frontend.outputs import RequestOutput
from quire.frontend.parsing.events import Event, Finish, Usage
from quire.frontend.requests.time_slices import in_thread_if_long


class ChatCompletions:
    """Answers chat requests. It needs no HTTP, so the batch runner uses it too."""

    def __init__(self, engine: AsyncLLM, server: ServerConfig, conversations: Conversations) -> None:
        self._engine = engine
        self._server = server
        self._replies = Replies(engine, server, "chatcmpl", reports_cached=True)
        self._conversations = conversations
        self._encoder = msgspec.json.Encoder()

    async def complete(self, request: ChatRequest, headers: ClientHeaders = ClientHeaders()) -> ChatCompletion:
        """The whole answer; cancelling aborts it in the engine.

        Raises:
            RequestError: the request cannot be served as asked.
            EngineError: the engine failed.
        """
        reply = self._replies.begin(request, headers)
        turn = await self._conversations.open(request.to_chat_input(), reply.id, headers)
        return await self.answer(request, reply, turn)

    async def answer(self, request: ChatRequest, reply: Reply, turn: Turn) -> ChatCompletion:
        """The whole answer of `turn`; cancelling aborts it. Raises QuireError."""
        try:
            output, events = await turn.whole()
        finally:
            turn.close()
        num_tokens = sum(len(each.token_ids) for each in output.outputs)
        num_reasoning, num_cached = await turn.count_reasoning(num_tokens), output.num_cached_tokens or 0
        if (predicted := turn.predicted) is not None:
            for each in output.outputs:
                predicted.add(each.index, each.token_ids)
        prediction = None if predicted is None else predicted.counts
        usage = reply.usage(Usage(output.num_prompt_tokens, num_tokens, num_cached, num_reasoning, prediction))
        returns_ids = bool(request.return_token_ids) and turn.shows_tokens
        answer = functools.partial(self._answer, request, reply, output, events, usage, returns_ids=returns_ids)
        return await in_thread_if_long(answer, is_long=len(output.outputs) > INLINE_CHOICES)

    async def stream(
        self, request: ChatRequest, headers: ClientHeaders = ClientHeaders()
    ) -> AsyncGenerator[bytes, None]:
        """The answer as events; closing the generator aborts it in the engine. Errors as for `complete`."""
        reply = self._replies.begin(request, headers)
        turn = await self._conversations.open(request.to_chat_input(), reply.id, headers)
        try:
            formatter, role = self.formatter(request), self.role(request)
            chunks = ChatChunks(request, reply, role, formatter, self._encoder, turn)
            yield Accepted(chunks.open())
            async for output in turn.stream:
                frame = chunks.add(output)
                if output.finished:  # one write for the last text and the end
                    frame += await chunks.end()
                if frame:
                    yield frame
        finally:
            turn.close()

    def formatter(self, request: ChatRequest) -> LogprobFormatter:
        """The formatter of an answer's log-probabilities."""
        return self._replies.formatter(request, request.top_logprobs)

    def role(self, request: ChatRequest) -> str:
        """Role of the answer; a message that the model continues keeps its own role."""
        if request.add_generation_prompt is not False:
            return self._server.response_role
        return str(request.messages[-1].get("role", self._server.response_role))

    def _answer(
        self,
        request: ChatRequest,
        reply: Reply,
        output: RequestOutput,
        events: list[list[Event]] | None,
        usage: CompletionUsage,
        *,
        returns_ids: bool,
    ) -> ChatCompletion:
        formatter, role = self.formatter(request), self.role(request)
        echoed = request.echoed(role)
        choices = []
        for each in output.outputs:
            finish = Finish(each.finish_reason, each.stop_reason)  # type: ignore[arg-type]
            message = ChatMessage(role=role, content=each.text)
            if events is not None:
                message, finish = read_message(
                    role, events[each.index], is_forced=request.names_call or request.tool_choice == "required"
                )
            if echoed:
                message.content = echoed + (message.content or "")
            choices.append(
                ChatChoice(
                    index=each.index,
                    message=message,
                    logprobs=formatter.chat(each.logprobs) if each.logprobs is not None else None,
                    finish_reason=finish_reason_of(finish, request),
                    stop_reason=finish.stop_reason,
                    token_ids=each.token_ids if returns_ids else None,
                    weight_versions=request.weight_versions(len(each.token_ids)),
                )
            )
        return ChatCompletion(
            id=reply.id,
            created=reply.created,
            model=reply.model,
            choices=choices,
            system_fingerprint=reply.fingerprint,
            usage=usage,
            prompt_logprobs=prompt_logprobs(output.prompt_logprobs),
            prompt_token_ids=output.prompt_token_ids if request.return_token_ids else None,
        )
