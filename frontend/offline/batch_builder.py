"""Makes batches of what the methods of `LLM` are given."""

import asyncio
from collections.abc import Sequence
from typing import Any, Literal

from quire.core.errors import ParameterError
from quire.core.wire.sampling_params import SamplingParams
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.chat.media_parts import Taken, take_media
from quire.frontend.media.settings import Overrides
from quire.frontend.offline.arguments import (
    LoRAs,
    adapters_of,
    conversations_of,
    one_each,
    prompts_of,
    with_kwargs,
)
from quire.frontend.offline.batch import Batch
from quire.frontend.requests.prompt import ItemsPrompt, PromptLike
from quire.frontend.requests.tokenization import Tokenization
from quire.frontend.text.chat_template import Message

Conversations = Message | Sequence[Message] | Sequence[Sequence[Message]]
ContentChoice = Literal["auto", "string", "openai"]
Params = SamplingParams | Sequence[SamplingParams] | None


class BatchBuilder:
    """Reads prompts, conversations and what comes with them.

    Args:
        llm: has the checkpoint's templates and defaults.
        chat_template: the text of the template for conversations that bring none; None for the checkpoint's.
    """

    def __init__(self, llm: AsyncLLM, chat_template: str | None) -> None:
        self._llm = llm
        self._chat_template = chat_template

    def of_prompts(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: Params,
        priority: int | Sequence[int] | None,
        lora_request: LoRAs,
        tokenization_kwargs: dict[str, Any] | None,
        mm_processor_kwargs: dict[str, Any] | None,
    ) -> Batch:
        """A batch of one or many prompts; arguments and errors are those of `LLM.generate`."""
        many = with_kwargs(prompts_of(prompts), self._overrides(mm_processor_kwargs).processor)
        return self._batch(many, sampling_params, priority, lora_request, Tokenization.read(tokenization_kwargs))

    async def of_conversations(
        self,
        messages: Conversations,
        sampling_params: Params,
        priority: int | Sequence[int] | None,
        lora_request: LoRAs,
        *,
        chat_template: str | None,
        content_format: ContentChoice,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: list[dict[str, Any]] | None,
        chat_template_kwargs: dict[str, Any] | None,
        tokenization_kwargs: dict[str, Any] | None,
        mm_processor_kwargs: dict[str, Any] | None,
    ) -> Batch:
        """A batch of one or many conversations; arguments and errors are those of `LLM.chat`."""
        self._llm.check_generates()
        tokenization = Tokenization.read(tokenization_kwargs, add_special_tokens=False)
        overrides = self._overrides(mm_processor_kwargs)
        taken = [await take_media(each, self._llm.media, overrides) for each in conversations_of(messages)]

        def written(conversation: Taken) -> PromptLike:
            text = self._llm.chat_templates.render(
                conversation.messages,
                tools=tools,
                chat_template=chat_template or self._chat_template,
                content_format=content_format,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
                placeholders=conversation.placeholders,
            )
            return ItemsPrompt(text, conversation.parts) if conversation.parts else text

        prompts = await asyncio.to_thread(lambda: list(map(written, taken)))
        return self._batch(prompts, sampling_params, priority, lora_request, tokenization)

    def _overrides(self, mm_processor_kwargs: dict[str, Any] | None) -> Overrides:
        overrides = Overrides.read(mm_processor_kwargs)
        if overrides.field is not None and self._llm.media is None:
            raise ParameterError(
                "mm_processor_kwargs are for models that read images, videos or sounds in prompts; leave them out.",
                param="mm_processor_kwargs",
            )
        return overrides

    def _batch(
        self,
        prompts: Sequence[PromptLike],
        sampling_params: Params,
        priority: int | Sequence[int] | None,
        lora_request: LoRAs,
        tokenization: Tokenization,
    ) -> Batch:
        count, defaults = len(prompts), self._llm.get_default_sampling_params()
        params = one_each("sampling_params", sampling_params, SamplingParams, count, defaults)
        priorities = one_each("priority", priority, int, count, 0)
        return Batch(prompts, params, priorities, adapters_of(lora_request, count), tokenization)
