"""Renders a conversation into its prompt: the chat template's text, and the text's tokens."""

import asyncio
from typing import Any

from quire.core.errors import ParameterError
from quire.frontend.chat.chat_input import ChatInput
from quire.frontend.chat.config import ChatConfig
from quire.frontend.chat.media_parts import take_media
from quire.frontend.parsing.answers.parsers import OutputParsers
from quire.frontend.requests.async_tokenizer import AsyncTokenizer
from quire.frontend.requests.media_prompts import MediaPrompts
from quire.frontend.requests.prompt import Prompt
from quire.frontend.text.chat_templates import ChatTemplates
from quire.frontend.text.content_forms import Placeholders

INLINE_CHARACTERS = 32_768
"""Longer conversations are rendered in a thread (a fraction of a millisecond for this many)."""


class Renderer:
    """Renders conversations.

    Args:
        templates: the checkpoint's chat templates.
        tokenizer: makes token ids of a template's text.
        parsers: give ids of calls in the form that the model's template accepts.
        config: the server's own template, and whether clients may send theirs.
        media: reads conversations with images and sounds; None where the model reads text alone.
    """

    def __init__(
        self,
        templates: ChatTemplates,
        tokenizer: AsyncTokenizer,
        parsers: OutputParsers,
        config: ChatConfig,
        media: MediaPrompts | None = None,
    ) -> None:
        self._templates = templates
        self._tokenizer = tokenizer
        self._parsers = parsers
        self._config = config
        self._media = media
        self._own_template = config.read_chat_template()

    async def render(self, chat: ChatInput, *, must_fit: bool = True) -> Prompt:
        """The prompt.

        Args:
            must_fit: before tokenizing, refuse a text that exceeds the context whatever its tokens are. False for a
                prompt that will be cut.

        Raises:
            ParameterError: the conversation cannot be rendered, by field; the rendered text is called `prompt`.
        """
        self._check_overrides(chat)
        messages, parts, placeholders = await take_media(chat.messages, self._media, chat.media)
        if chat.num_characters > INLINE_CHARACTERS:
            text = await asyncio.to_thread(self._write, chat, messages, placeholders)
        else:
            text = self._write(chat, messages, placeholders)
        special = chat.add_special_tokens
        if self._templates.joins and chat.chat_template is None and self._own_template is None:
            special = True
        if self._media is not None and parts:
            return await self._media.read(text, parts, add_special_tokens=special, must_fit=must_fit, param="messages")
        return Prompt(text, await self._tokenizer.tokenize(text, add_special_tokens=special, must_fit=must_fit))

    def _check_overrides(self, chat: ChatInput) -> None:
        """Refuses a request's own settings of media, unless the server trusts it with them."""
        field = chat.media.field
        if field is None:
            return
        if self._media is None:
            raise ParameterError(f"{field} is refused: this model reads text only; leave it out.", param=field)
        if not self._config.trust_request_mm_kwargs:
            raise ParameterError(
                f"This server does not take {field} of requests; its --trust-request-mm-kwargs lets it. --"
                f"{field.replace('_', '-')} sets them for all.",
                param=field,
            )

    def _write(self, chat: ChatInput, messages: list[dict[str, Any]], placeholders: Placeholders) -> str:
        config = self._config
        if chat.chat_template is not None and not config.trust_request_chat_template:
            raise ParameterError(
                "This server does not run clients' chat templates; its --trust-request-chat-template lets it. "
                "chat_template_kwargs may be sent.",
                param="chat_template",
            )
        leaves_tools_out = chat.tools.choice.mode == "none" and config.exclude_tools_when_tool_choice_none
        return self._templates.render(
            self._parsers.readable(messages),
            tools=None if leaves_tools_out else chat.tools.described,
            documents=chat.documents,
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            chat_template=chat.chat_template or self._own_template,
            content_format=config.chat_template_content_format,
            chat_template_kwargs={**chat.request_variables, **config.template_variables(chat)},
            placeholders=placeholders,
        )
