"""POST /v1/chat/completions/batch: many conversations in, one choice for each."""

import asyncio
import functools
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import UNSET

from quire.core.errors import ParameterError
from quire.core.wire.sampling_params import MAX_COMPLETIONS
from quire.frontend.chat.body_fields import read_sampling
from quire.frontend.chat.client_headers import ClientHeaders
from quire.frontend.chat.list_limits import check_lists
from quire.frontend.openai.answers import ChatCompletion, CompletionTokensDetails, CompletionUsage, PromptTokensDetails
from quire.frontend.openai.chat import ChatCompletions
from quire.frontend.openai.generation import INLINE_CHOICES
from quire.frontend.openai.schema import ChatRequest
from quire.frontend.requests.merging import cancel
from quire.frontend.requests.time_slices import in_thread_if_long, in_time_slices


class BatchChatRequest(ChatRequest, kw_only=True):
    """Body of POST /v1/chat/completions/batch: as for one conversation, but for `messages`, a list of conversations."""

    messages: list[list[dict[str, Any]]]  # type: ignore[assignment]

    def conversations(self) -> Iterator[ChatRequest]:
        """One request for each conversation, once the fields that all share are checked.

        Raises:
            ParameterError: a field that is for a single conversation only, or too many conversations.
        """
        for name, harmless in (("stream", False), ("tools", []), ("n", 1), ("use_beam_search", False)):
            value = getattr(self, name)
            if value is not None and value != harmless:
                raise ParameterError(f"{name} is for single conversations; leave it out.", param=name)
        if not 0 < len(self.messages) <= MAX_COMPLETIONS:
            raise ParameterError(
                f"messages must hold between 1 and {MAX_COMPLETIONS} conversations, got {len(self.messages)}.",
                param="messages",
            )
        check_lists(read_sampling(self), len(self.messages))
        fields = {name: getattr(self, name) for name in ChatRequest.__struct_fields__ if name != "messages"}
        return (ChatRequest(messages=messages, **fields) for messages in self.messages)


class BatchChat:
    """Answers a batch of conversations as single requests that run concurrently."""

    def __init__(self, chat: ChatCompletions) -> None:
        self._chat = chat

    async def complete(self, request: BatchChatRequest, headers: ClientHeaders = ClientHeaders()) -> ChatCompletion:
        """The whole answer. The first conversation that fails aborts all the others in the engine; so does cancelling.

        Raises:
            RequestError: a conversation cannot be served as asked.
            EngineError: the engine failed.
        """
        conversations = request.conversations()
        tasks: list[asyncio.Task[ChatCompletion]] = []
        try:
            async for each in in_time_slices(conversations, most=1):
                if tasks and tasks[-1].done() and tasks[-1].exception() is not None:  # refused: so is the whole batch
                    break
                tasks.append(asyncio.create_task(self._chat.complete(each, headers)))
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)  # gather would cancel all in one turn
            answers = await asyncio.gather(*(task for task in tasks if task.done()))
        finally:
            await cancel(tasks)
        return await in_thread_if_long(functools.partial(_joined, answers), is_long=len(answers) > INLINE_CHOICES)


def _joined(answers: list[ChatCompletion]) -> ChatCompletion:
    """The first answer, with the choices of all answers."""
    choices = [
        msgspec.structs.replace(choice, index=index)
        for index, answer in enumerate(answers)
        for choice in answer.choices
    ]
    return msgspec.structs.replace(answers[0], choices=choices, usage=_sum([answer.usage for answer in answers]))


def _sum(usages: list[CompletionUsage]) -> CompletionUsage:
    cached = [usage.prompt_tokens_details.cached_tokens for usage in usages if usage.prompt_tokens_details]
    details = [usage.completion_tokens_details for usage in usages if usage.completion_tokens_details is not None]
    return CompletionUsage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        total_tokens=sum(usage.total_tokens for usage in usages),
        prompt_tokens_details=PromptTokensDetails(sum(cached)) if cached else None,
        completion_tokens_details=_sum_of_details(details) if details else None,
    )


def _sum_of_details(details: list[CompletionTokensDetails]) -> CompletionTokensDetails:
    columns = zip(*(msgspec.structs.astuple(each) for each in details), strict=True)
    counted = [[count for count in column if count is not UNSET] for column in columns]
    return CompletionTokensDetails(*(sum(column) if column else UNSET for column in counted))
