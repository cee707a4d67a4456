"""POST /v1/chat/completions/derender and /v1/completions/derender: tokens of another server in, the plain answer out.

The server keeps nothing between the events of a stream. The client sends the tokens so far, which are read again.
"""

import functools
import time

from msgspec import UNSET, UnsetType

from quire.core.errors import ParameterError
from quire.core.wire.sampling_params import MAX_COMPLETIONS, SamplingParams
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.chat.answer_events import Choice
from quire.frontend.chat.conversation import Conversations
from quire.frontend.openai.answers import ChatChunk, ChatCompletion, CompletionChunk, CompletionUsage, TextCompletion
from quire.frontend.openai.chat import ChatCompletions
from quire.frontend.openai.completion_events import text_of
from quire.frontend.openai.completions import TextCompletions
from quire.frontend.openai.derender_bodies import (
    DerenderChatRequest,
    DerenderCompletionRequest,
    DerenderedChunk,
    GivenUsage,
)
from quire.frontend.openai.derender_events import ChatPart, completion_part
from quire.frontend.openai.derender_reading import (
    INLINE_TOKENS,
    GivenReader,
    check_stops,
    for_each,
    read_chat,
    read_text,
    required,
)
from quire.frontend.openai.generation import Reply
from quire.frontend.requests.time_slices import in_thread_if_long


class Derendering:
    """Answers the routes that derender."""

    def __init__(
        self, engine: AsyncLLM, conversations: Conversations, chat: ChatCompletions, text: TextCompletions
    ) -> None:
        self._engine = engine
        self._conversations = conversations
        self._chat = chat
        self._text = text
        self._given = GivenReader(engine)

    # --------------------------------------------------------------------------------------------------------- chat

    async def chat(self, request: DerenderChatRequest) -> ChatCompletion | DerenderedChunk[ChatChunk]:
        """The answer to a conversation, or with `stream` one event of it. Raises RequestError."""
        self._engine.model.choose(request.model)
        if request.chat_request is None and self._conversations.parses:
            raise ParameterError(
                "chat_request is required: this server finds reasoning or calls in answers, and they would be told as "
                "they are written.",
                param="chat_request",
            )
        return await (self._chat_event(request) if request.stream else self._whole_chat(request))

    async def _whole_chat(self, request: DerenderChatRequest) -> ChatCompletion:
        given = required(request.generate_response, "generate_response")
        asked, chat = read_chat(request, len(given.choices))
        prompt_ids = request.prompt_token_ids if request.prompt_token_ids is not None else given.prompt_token_ids
        self._given.check_ids(prompt_ids or (), "prompt_token_ids")
        if prompt_ids is None and request.chat_request is not None:
            prompt_ids = (await self._conversations.render(chat)).token_ids
        choices = await self._conversations.choices(chat, prompt_ids or [])
        output = await self._given.output(given, prompt_ids or [], self._conversations.text_sampling(chat))
        turn = self._conversations.reread(chat, output, choices)
        if not turn.shows_tokens:
            for each in output.outputs:
                each.logprobs = None
        answer = await self._chat.answer(asked, self._reply(given.request_id, request.model, given.usage), turn)
        for choice, one in zip(answer.choices, given.choices, strict=True):
            choice.index = one.index
        _count_prompt(answer.usage, request.prompt_tokens or 0)
        return answer

    async def _chat_event(self, request: DerenderChatRequest) -> DerenderedChunk[ChatChunk]:
        given = required(request.generate_chunk, "generate_chunk")
        if self._conversations.parses and request.prompt_token_ids is None:
            raise ParameterError(
                "prompt_token_ids are required: this server finds reasoning in answers, and the prompt may have opened "
                "it.",
                param="prompt_token_ids",
            )
        asked, chat = read_chat(request, 1)
        check_stops(asked, "chat_request")
        prompt_ids = request.prompt_token_ids if request.prompt_token_ids is not None else given.prompt_token_ids
        state, part = self._given.event(given, request.stream_state, prompt_ids or [])
        choices = await self._conversations.choices(chat, prompt_ids or [])
        place = ChatPart(
            request=asked,
            reader=Choice(None) if choices is None else choices[0],
            replay=self._given.replay(prompt_ids or [], self._conversations.text_sampling(chat)),
            formatter=self._chat.formatter(asked),
            role=self._chat.role(asked),
            shows_tokens=self._conversations.shows_tokens(chat),
        )
        chunk = ChatChunk(
            id=given.request_id,
            created=int(time.time()),
            model=request.model or self._engine.model.chosen_name,
            choices=[],
        )
        if part is not None:
            rows = self._given.rows(part, [*(prompt_ids or []), *state.output_token_ids])
            read = functools.partial(place.read, state, part, rows)
            choice, state = await in_thread_if_long(read, is_long=len(state.output_token_ids) > INLINE_TOKENS)
            chunk.choices = [choice]
        chunk.usage = _event_usage(given.usage, request.prompt_tokens)
        if asked.return_token_ids and given.prompt_token_ids is not None:
            chunk.prompt_token_ids = given.prompt_token_ids
        return DerenderedChunk(chunk=chunk, stream_state=state)

    # --------------------------------------------------------------------------------------------------------- text

    async def completion(self, request: DerenderCompletionRequest) -> TextCompletion | DerenderedChunk[CompletionChunk]:
        """The completions of all prompts, or with `stream` one event of one. Raises RequestError."""
        self._engine.model.choose(request.model)
        return await (self._text_event(request) if request.stream else self._whole_text(request))

    async def _whole_text(self, request: DerenderCompletionRequest) -> TextCompletion:
        given = required(request.generate_responses, "generate_responses")
        if not given or len(given) > MAX_COMPLETIONS:
            raise ParameterError(
                f"generate_responses must be 1 to {MAX_COMPLETIONS}; there are {len(given)}.",
                param="generate_responses",
            )
        counts = for_each(request.prompt_tokens, int, "prompt_tokens", len(given))
        prompts = for_each(request.prompt_token_ids, list, "prompt_token_ids", len(given))
        asked = read_text(request)
        sampling, outputs = SamplingParams(**self._text.sampling_fields(asked)), []
        for each, ids in zip(given, prompts, strict=True):
            ids = ids if ids is not None else each.prompt_token_ids or []
            outputs.append(await self._given.output(each, ids, sampling))
        cached = [each.usage.cached_tokens for each in given if each.usage is not None]
        usage = GivenUsage() if len(cached) < len(given) or None in cached else given[0].usage
        answer = self._text.answer(asked, self._reply(given[0].request_id, request.model, usage), outputs)
        for index, choice in enumerate(answer.choices):
            choice.index = index
        _count_prompt(answer.usage, sum(each or 0 for each in counts))
        return answer

    async def _text_event(self, request: DerenderCompletionRequest) -> DerenderedChunk[CompletionChunk]:
        given = required(request.generate_chunk, "generate_chunk")
        asked = read_text(request)
        check_stops(asked, "completion_request")
        if isinstance(request.prompt_tokens, list):
            raise ParameterError("prompt_tokens must be one number with stream.", param="prompt_tokens")
        prompt_ids = given.prompt_token_ids or []
        if request.prompt_token_ids is not None:
            prompt_ids = [each for each in request.prompt_token_ids if isinstance(each, int)]
            if len(prompt_ids) != len(request.prompt_token_ids):
                raise ParameterError("prompt_token_ids must be those of one prompt.", param="prompt_token_ids")
        is_first = request.stream_state is None
        state, part = self._given.event(given, request.stream_state, prompt_ids)
        chunk = CompletionChunk(
            id=given.request_id,
            created=int(time.time()),
            model=request.model or self._engine.model.chosen_name,
            choices=[],
        )
        if part is not None:
            rows = self._given.rows(part, [*prompt_ids, *state.output_token_ids])
            replay = self._given.replay(prompt_ids, SamplingParams(**self._text.sampling_fields(asked)))
            formatter, size = self._text.formatter(asked), len(state.output_token_ids)
            choice, state = await in_thread_if_long(
                functools.partial(completion_part, asked, replay, formatter, state, part, rows),
                is_long=size > INLINE_TOKENS,
            )
            if asked.return_token_ids and given.prompt_token_ids is not None:
                choice.prompt_token_ids = given.prompt_token_ids
            if asked.echo and is_first:
                choice.text = text_of(prompt_ids, self._engine.tokenizer) + choice.text
            chunk.choices = [choice]
        chunk.usage = _event_usage(given.usage, request.prompt_tokens)
        return DerenderedChunk(chunk=chunk, stream_state=state)

    def _reply(self, request_id: str, model: str | None, usage: GivenUsage | None) -> Reply:
        return Reply(
            id=request_id,
            model=model or self._engine.model.chosen_name,
            created=int(time.time()),
            cache_details=usage is not None and usage.cached_tokens is not None,
            include_usage=True,
            continuous_usage=False,
        )


def _count_prompt(usage: CompletionUsage, num_prompt_tokens: int) -> None:
    """Sets the prompt's length, as the client has counted it."""
    usage.prompt_tokens = num_prompt_tokens
    usage.total_tokens = num_prompt_tokens + usage.completion_tokens


def _event_usage(usage: GivenUsage | None, num_prompt_tokens: int | None) -> CompletionUsage | UnsetType:
    """The usage of an event that has one."""
    if usage is None:
        return UNSET
    num_prompt = num_prompt_tokens if num_prompt_tokens is not None else usage.prompt_tokens or 0
    num_generated = usage.completion_tokens or 0
    return CompletionUsage(
        prompt_tokens=num_prompt,
        completion_tokens=num_generated,
        total_tokens=num_prompt + num_generated,
        prompt_tokens_details=usage.prompt_tokens_details,
    )
