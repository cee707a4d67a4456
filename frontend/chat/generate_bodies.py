"""Makes bodies of /inference/v1/generate of prompts, for the routes of all protocols that render."""

import functools

from quire.core.errors import ParameterError
from quire.core.wire.sampling_params import SamplingParams
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.chat.rendered import GenerateSampling, RenderedRequest
from quire.frontend.requests.async_tokenizer import INLINE_CHARACTERS
from quire.frontend.requests.prompt import Prompt
from quire.frontend.requests.time_slices import in_thread_if_long
from quire.frontend.text.truncation import Truncation


class PromptRendering:
    """Makes them."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine

    async def of_prompt(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        request_id: str,
        *,
        has_special_tokens: bool,
        truncation: Truncation | None = None,
        lowers_max_tokens: bool = False,
        wants_offsets: bool = False,
        param: str = "prompt",
    ) -> RenderedRequest:
        """The body for a prompt that was read.

        Args:
            has_special_tokens: the tokenizer has added its special tokens to the prompt's text.
            truncation: cuts a prompt that is too long; None refuses it.
            lowers_max_tokens: to what the prompt leaves room for.
            wants_offsets: return which characters of the text each token is.
            param: the client's name of the prompt.

        Raises:
            ParameterError: the prompt is too long, or the model has an encoder, for which such bodies have no place.
        """
        if self._engine.config.spec.encoder is not None:
            raise ParameterError(
                "Prompts of models with an encoder are not rendered: token ids name no side. Send the prompt itself.",
                param=param,
            )
        if prompt.media:
            raise ParameterError(
                "Prompts with images are not rendered: such a body has no place for them. Send the prompt itself.",
                param=param,
            )
        text, token_ids = prompt.text, prompt.token_ids
        offsets = None
        if text is not None and wants_offsets:
            tokenizer = self._engine.async_tokenizer.tokenizer
            find = functools.partial(tokenizer.offsets, text, add_special_tokens=has_special_tokens)
            offsets = await in_thread_if_long(find, is_long=len(text) > INLINE_CHARACTERS)
        if truncation is not None:
            cut = functools.partial(
                self._engine.prompts.part,
                prompt=prompt,
                truncation=truncation,
                max_tokens=sampling.max_tokens,
                has_special_tokens=has_special_tokens,
            )
            token_ids, offsets = cut(token_ids), None if offsets is None else cut(offsets)
        room = self._engine.max_model_len - len(token_ids)
        if room <= 0:
            raise ParameterError(
                f"The prompt has {len(token_ids)} tokens, but prompt and output together are limited to "
                f"{self._engine.max_model_len} (max_model_len); shorten it.",
                param=param,
            )
        if sampling.max_tokens is None or (lowers_max_tokens and sampling.max_tokens > room):
            sampling = sampling.replace(max_tokens=room)
        return RenderedRequest(
            request_id=request_id,
            token_ids=token_ids,
            prompt_text=text,
            token_offsets=offsets,
            sampling_params=GenerateSampling.of(sampling),
            model=self._engine.model.chosen_name,
        )
