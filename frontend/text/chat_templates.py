"""Chooses among a checkpoint's chat templates, and renders conversations."""

import functools
from typing import Any, Literal

from quire.core.errors import ParameterError
from quire.frontend.text.chat_template import ChatTemplate, Message
from quire.frontend.text.content_forms import Placeholders
from quire.frontend.text.tokenizer import Tokenizer, needed

_JOINED = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


class ChatTemplates:
    """The templates of one model; each is compiled once.

    Args:
        tokenizer: has the checkpoint's templates, and the special tokens that templates write; None to serve only
            token ids.
        model: the model's name, for errors.
        joins: a checkpoint without a template gets one that joins the contents of messages.
    """

    def __init__(self, tokenizer: Tokenizer | None, model: str, *, joins: bool = False) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._joins = joins
        self._compiled = functools.lru_cache(maxsize=16)(self._compile)

    @property
    def for_tools(self) -> str | None:
        """The checkpoint's template for conversations with tools; None if it has no template."""
        own = {} if self._tokenizer is None else self._tokenizer.chat_templates
        return own.get("tool_use", own.get("default"))

    @property
    def joins(self) -> bool:
        """True if prompts are the contents of messages alone, whose special tokens the tokenizer adds."""
        return self._joins and self.lacks("default")

    def lacks(self, name: str) -> bool:
        """True if the checkpoint has no template of this name."""
        return self._tokenizer is not None and name not in self._tokenizer.chat_templates

    def render(
        self,
        messages: list[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        content_format: Literal["auto", "string", "openai"] = "auto",
        chat_template_kwargs: dict[str, Any] | None = None,
        placeholders: Placeholders = Placeholders(),
    ) -> str:
        """The prompt of a conversation. To be tokenized without special tokens, because the template writes them.

        Args:
            chat_template: a Jinja template to use instead of the checkpoint's, or the name of one of the checkpoint's.
            placeholders: what stands for images where the template reads contents as strings.

        Raises:
            ParameterError: there is no template, or the template refuses the messages.
        """
        if not messages:
            raise ParameterError("messages must not be empty.", param="messages")
        template = self._compiled(self._choose(chat_template, with_tools=bool(tools)))
        return template.render(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            content_format=content_format,
            variables=chat_template_kwargs,
            placeholders=placeholders,
        )

    def _choose(self, chosen: str | None, *, with_tools: bool) -> str:
        own = needed(self._tokenizer).chat_templates
        if chosen is not None:
            return own.get(chosen, chosen)
        name = "tool_use" if with_tools and "tool_use" in own else "default"
        if name not in own and self._joins:
            return _JOINED
        if name not in own:
            names = f" Its templates are called {', '.join(sorted(own))}." if own else ""
            raise ParameterError(
                f"The model {self._model!r} has no chat template: start the server with --chat-template FILE, "
                f"or send text instead of messages, to a route that takes it, such as /v1/completions or "
                f"/v1/embeddings.{names}",
                param="messages",
            )
        return own[name]

    def _compile(self, source: str) -> ChatTemplate:
        return ChatTemplate(source, needed(self._tokenizer).special_tokens)
