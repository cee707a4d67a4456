"""Reads prompts of all forms into token ids, and checks them against one model."""

import functools
from collections.abc import Sequence
from typing import Any, TypeVar

from quire.core.errors import ParameterError
from quire.frontend.media.sources import MediaPart
from quire.frontend.requests.async_tokenizer import AsyncTokenizer
from quire.frontend.requests.context_limit import ContextLimit
from quire.frontend.requests.media_prompts import MediaPrompts, parts_of
from quire.frontend.requests.prompt import (
    ItemsPrompt,
    Prompt,
    PromptLike,
    ReadEmbeds,
    is_explicit,
    refuse_kwargs,
    split_prompt,
)
from quire.frontend.requests.request_fields import check_salt
from quire.frontend.text.truncation import AddedTokens, Truncation

T = TypeVar("T")


class PromptReader:
    """Reads, checks and cuts prompts.

    Args:
        tokenizer: makes token ids of texts.
        limit: the length of the model's context.
        vocab_size: rows of the model's embedding; ids at and above it are refused.
        read_embeds: reads prompts that are embeddings; None refuses them.
        media: reads prompts with images; None refuses them.
    """

    def __init__(
        self,
        tokenizer: AsyncTokenizer,
        limit: ContextLimit,
        *,
        vocab_size: int,
        read_embeds: ReadEmbeds | None = None,
        media: MediaPrompts | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._limit = limit
        self._vocab_size = vocab_size
        self._read_embeds = read_embeds
        self._media = media

    async def read(
        self, prompt: PromptLike | Prompt, *, add_special_tokens: bool = True, must_fit: bool = True
    ) -> Prompt:
        """Reads a prompt: a text, token ids, a dictionary, or a `Prompt` that is tokenized already.

        Args:
            must_fit: refuse a prompt that is longer than the context; False for one that will be cut.

        Raises:
            ParameterError: the prompt has none of these forms, is empty or too long, or has ids outside the vocabulary.
        """
        if isinstance(prompt, Prompt):
            return self._checked(prompt)
        if must_fit and isinstance(prompt, list) and len(prompt) > self._limit.longest_prompt:
            raise self._limit.too_long(len(prompt))
        if isinstance(prompt, ItemsPrompt):
            return await self._with_media(prompt.text, None, prompt.items, None, add_special_tokens, must_fit)
        if is_explicit(prompt):
            raise ParameterError(
                "encoder_prompt and decoder_prompt are for models with an encoder, and this one has none; give prompt.",
                param="encoder_prompt",
            )
        if self._media is None:
            refuse_kwargs(prompt)
        text, token_ids, cache_salt = split_prompt(prompt)
        check_salt(cache_salt)
        if isinstance(prompt, dict) and (embeds := prompt.get("prompt_embeds")) is not None:
            return await self._embedded(embeds, Prompt(text, [], cache_salt))
        if parts := parts_of(prompt):
            return await self._with_media(text, token_ids, parts, cache_salt, add_special_tokens, must_fit)
        if token_ids is None:
            assert text is not None
            token_ids = await self._tokenizer.tokenize(text, add_special_tokens=add_special_tokens, must_fit=must_fit)
        return self._checked(Prompt(text, token_ids, cache_salt))

    async def _with_media(
        self,
        text: str | None,
        token_ids: list[int] | None,
        parts: Sequence[MediaPart],
        cache_salt: str | None,
        add_special_tokens: bool,
        must_fit: bool,
    ) -> Prompt:
        if self._media is None:
            raise ParameterError("This model reads text only; leave multi_modal_data out.", param="multi_modal_data")
        if token_ids is not None:
            prompt = await self._media.read_ids(token_ids, parts)
        else:
            assert text is not None
            prompt = await self._media.read(text, parts, add_special_tokens=add_special_tokens, must_fit=must_fit)
        return self._checked(prompt._replace(text=text, cache_salt=cache_salt))

    async def _embedded(self, value: Any, prompt: Prompt) -> Prompt:
        if self._read_embeds is None:
            raise ParameterError(
                "prompt_embeds are not taken here: start the server with --enable-prompt-embeds (LLM with "
                "enable_prompt_embeds=True), or send text or token ids.",
                param="prompt_embeds",
            )
        read = functools.partial(self._read_embeds, value, self._limit.max_model_len)
        embeds, num_tokens = await self._tokenizer.in_thread(read)
        return prompt._replace(token_ids=[0] * num_tokens, embeds=embeds)

    def _checked(self, prompt: Prompt) -> Prompt:
        check_ids(prompt.token_ids, self._vocab_size)
        return prompt

    def truncate(
        self,
        prompt: Prompt,
        truncation: Truncation,
        max_tokens: int | None,
        *,
        has_special_tokens: bool,
        num_before: int = 0,
    ) -> Prompt:
        """The part of a prompt that `truncation` keeps; a prompt that was cut has no text.

        Args:
            has_special_tokens: the tokenizer has added its special tokens to the prompt's text.
            num_before: rows of a soft prompt, which take room as well.

        Raises:
            ParameterError: `truncation` keeps more tokens than there is room for.
        """
        if prompt.embeds is not None:
            raise ParameterError(
                "truncate_prompt_tokens cuts text and token ids; send as many rows of prompt_embeds as are wanted.",
                param="truncate_prompt_tokens",
            )
        kept = self.part(
            prompt.token_ids,
            prompt,
            truncation,
            max_tokens,
            has_special_tokens=has_special_tokens,
            num_before=num_before,
        )
        if kept is prompt.token_ids:
            return prompt
        if prompt.media:
            raise ParameterError(
                f"The prompt has {len(prompt.token_ids)} tokens, and one with images is not cut: shorten it, or leave "
                "truncate_prompt_tokens out.",
                param="truncate_prompt_tokens",
            )
        lead = 0 if (truncation.side or truncation.text_side) == "left" else prompt.num_lead_tokens
        return prompt._replace(text=None, token_ids=kept, num_lead_tokens=lead)

    def part(
        self,
        tokens: list[T],
        prompt: Prompt,
        truncation: Truncation,
        max_tokens: int | None,
        *,
        has_special_tokens: bool,
        num_before: int = 0,
    ) -> list[T]:
        """The part of a list with something for each token of `prompt`; arguments and errors are `truncate`'s."""
        added = AddedTokens()
        if prompt.text is not None and has_special_tokens:
            added = self._tokenizer.added_tokens(prompt.token_ids)
        room, rule = self._limit.room(max_tokens, num_before), self._limit.room_rule
        return truncation.apply(tokens, room=room, rule=rule, added=added)


def check_ids(token_ids: Sequence[int], vocab_size: int, param: str = "prompt") -> None:
    """Refuses a prompt that is empty, or has ids outside the vocabulary.

    Raises:
        ParameterError: `param` names the prompt.
    """
    if not token_ids:
        raise ParameterError(f"The {param} is empty; it needs at least one token.", param=param)
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise ParameterError(
            f"Token id {wrong} in the {param} is outside the model's vocabulary (0 to {vocab_size - 1}).",
            param=param,
        )


def embeds_reader(hidden_size: int) -> ReadEmbeds:
    """A reader of embeddings with `hidden_size` elements a token."""
    from quire.frontend.requests.prompt_embeds import EmbedsReader  # needs NumPy, which most servers do without

    return EmbedsReader(hidden_size).read
