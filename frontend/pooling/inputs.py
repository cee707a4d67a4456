"""Reads the inputs of a request into prompts: texts, token ids and conversations."""

import functools
import sys
from collections.abc import Sequence
from typing import Any

from quire.core.errors import ParameterError
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.chat.body_fields import read_overrides
from quire.frontend.chat.chat_input import ChatInput
from quire.frontend.chat.conversation import Conversations
from quire.frontend.chat.renaming import renamed
from quire.frontend.pooling.fields import MAX_INPUTS, InputBody
from quire.frontend.requests.async_tokenizer import INLINE_CHARACTERS
from quire.frontend.requests.named_prompts import num_lead_tokens
from quire.frontend.requests.prompt import Prompt, PromptLike
from quire.frontend.requests.ranked_lists import joined
from quire.frontend.requests.time_slices import in_time_slices
from quire.frontend.text.truncation import Truncation

Conversation = list[dict[str, Any]]

_OF_CONVERSATIONS = ("chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")


class Inputs:
    """Reads inputs.

    Args:
        conversations: render conversations.
    """

    def __init__(self, engine: AsyncLLM, conversations: Conversations) -> None:
        self._engine = engine
        self._conversations = conversations

    async def read(self, request: InputBody, *, before: str = "") -> list[Prompt]:
        """The prompts of a request, cut and padded as it asks.

        Args:
            before: a text that each text of `input` begins with; token ids and conversations are complete.

        Raises:
            ParameterError: an input is malformed, too long or empty, or there are too many.
        """
        talks, name = conversations_of(request), "input" if request.messages is None else "messages"
        if talks is not None:
            prompts = [await self._render(each, request) async for each in in_time_slices(talks)]
            special = bool(request.add_special_tokens)
        else:
            for field in _OF_CONVERSATIONS:
                if getattr(request, field):
                    raise ParameterError(
                        f"{field} is for conversations, and {name} has none; leave it out.", param=field
                    )
            special = request.add_special_tokens is not False
            inputs = joined(self._engine.config.pooling, inputs_of(request.input), request.truncation)
            inputs = [before + each if isinstance(each, str) else each for each in inputs]
            prompts = await self.read_prompts(
                inputs,
                add_special_tokens=special,
                must_fit=request.truncation is None,
                before=before if isinstance(inputs[0], str) else "",
            )
        return self.fit(prompts, request.truncation, has_special_tokens=special, pads=request.pads, name=name)

    async def read_prompts(
        self,
        inputs: Sequence[PromptLike],
        *,
        add_special_tokens: bool = True,
        must_fit: bool = True,
        name: str = "input",
        before: str = "",
    ) -> list[Prompt]:
        """Texts and token ids as prompts; many texts are tokenized at once, on all cores.

        Args:
            before: the named prompt that each text begins with.
            must_fit: refuse what is longer than the context; False for what will be cut.
            name: the client's name of the inputs.

        Raises:
            ParameterError: as for `read`.
        """
        reader, tokenizer = self._engine.prompts, self._engine.async_tokenizer
        must_fit = must_fit and self._longest == self._engine.limit.longest_prompt
        given: list[PromptLike | Prompt] = list(inputs)
        texts = [each for each in inputs if isinstance(each, str)]
        if len(texts) > 1 and sum(map(len, texts)) > INLINE_CHARACTERS:
            for index, each in enumerate(inputs):
                if isinstance(each, str) and len(each) > INLINE_CHARACTERS:
                    with renamed(prompt=_numbered(name, index, inputs)):
                        await tokenizer.check_length(each, must_fit=must_fit)
            with renamed(prompt=name):
                made = iter(await tokenizer.tokenize_batch(texts, add_special_tokens=add_special_tokens))
            given = [Prompt(each, next(made)) if isinstance(each, str) else each for each in inputs]
        prompts = []
        async for index, prompt in in_time_slices(enumerate(given)):
            with renamed(prompt=_numbered(name, index, inputs)):
                prompts.append(await reader.read(prompt, add_special_tokens=add_special_tokens, must_fit=must_fit))
        lead = num_lead_tokens(tokenizer, self._engine.config.pooling, before)
        return [prompt._replace(num_lead_tokens=lead) for prompt in prompts] if lead else prompts

    def fit(
        self,
        prompts: list[Prompt],
        truncation: Truncation | None,
        *,
        has_special_tokens: bool,
        pads: bool = False,
        name: str = "input",
    ) -> list[Prompt]:
        """Prompts that are cut, and padded to the model's length.

        Args:
            name: the client's name of the inputs.

        Raises:
            ParameterError: a prompt is too long, a cut keeps more tokens than the model reads, or there is no padding
                token.
        """
        if truncation is not None:
            cut = functools.partial(
                self._engine.prompts.truncate,
                truncation=truncation,
                max_tokens=None,
                has_special_tokens=has_special_tokens,
            )
            prompts = [cut(each) for each in prompts]
        self._check_lengths(prompts, name)
        return [self._padded(each) for each in prompts] if pads else prompts

    def _check_lengths(self, prompts: list[Prompt], name: str) -> None:
        longest = self._longest
        for index, prompt in enumerate(prompts):
            if len(prompt.token_ids) > longest:
                with renamed(prompt=_numbered(name, index, prompts)):
                    raise self._engine.limit.too_long(len(prompt.token_ids), longest)

    @property
    def _longest(self) -> int:
        """The most tokens of a prompt; long ones may be computed in parts."""
        limit, pooling = self._engine.limit, self._engine.config.pooling
        if pooling is None or not pooling.enable_chunked_processing:
            return limit.longest_prompt
        return pooling.max_embed_len or sys.maxsize

    def _padded(self, prompt: Prompt) -> Prompt:
        if prompt.media:
            return prompt
        padded = self._engine.async_tokenizer.padded(prompt.token_ids, self._engine.max_model_len)
        if padded is prompt.token_ids:
            return prompt
        return prompt._replace(text=None, token_ids=padded)

    async def _render(self, messages: Conversation, request: InputBody) -> Prompt:
        chat = ChatInput(
            names={},
            messages=messages,
            add_generation_prompt=bool(request.add_generation_prompt),
            continue_final_message=bool(request.continue_final_message),
            add_special_tokens=bool(request.add_special_tokens),
            chat_template=request.chat_template,
            template_variables=request.chat_template_kwargs or {},
            media=read_overrides(request),
        ).checked()
        return await self._conversations.render(chat, must_fit=request.truncation is None)


def _numbered(name: str, index: int, inputs: Sequence[Any]) -> str:
    """A client's name of one of its inputs."""
    return name if len(inputs) == 1 else f"{name}[{index}]"


def conversations_of(request: InputBody) -> list[Conversation] | None:
    """The conversations of a request; None if it has texts or token ids.

    Raises:
        ParameterError: conversations and others are mixed, or there are too many.
    """
    name = "input" if request.messages is None else "messages"
    given: Any = getattr(request, name)
    if not isinstance(given, list) or not given:
        if name == "messages":
            raise ParameterError("messages must not be empty.", param=name)
        return None
    if all(isinstance(each, dict) for each in given):
        return [given]
    if all(isinstance(each, list) and each and isinstance(each[0], dict) for each in given):
        _check_number(given, name)
        return given
    if name == "messages" or any(isinstance(each, dict) for each in given):
        raise ParameterError(f"{name} must be a conversation, or a list of conversations, without gaps.", param=name)
    return None


def inputs_of(given: Any) -> list[str | list[int]]:
    """Texts, or lists of token ids.

    Raises:
        ParameterError: none, a mixture, or too many.
    """
    if isinstance(given, str):
        return [given]
    if not given:
        raise ParameterError("input must not be an empty list.", param="input")
    kinds = set(map(type, given))
    if kinds == {int}:
        return [given]
    if kinds == {str} or (kinds == {list} and all(set(map(type, each)) <= {int} for each in given)):
        _check_number(given, "input")
        return given
    raise ParameterError(
        "input must be a string, a list of strings, token ids, a list of lists of token ids, or conversations, not a "
        "mixture.",
        param="input",
    )


def _check_number(given: list[Any], name: str) -> None:
    if len(given) > MAX_INPUTS:
        raise ParameterError(
            f"{name} has {len(given)} entries, but one request may have {MAX_INPUTS}; send several requests.",
            param=name,
        )
