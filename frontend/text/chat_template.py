"""Renders a conversation as a prompt with the checkpoint's Jinja template, as Transformers does.

Templates are not trusted: they run in a sandbox (`template_sandbox.py`) and get only plain JSON data.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from quire.core.errors import ConfigError, ParameterError
from quire.core.logging import get_logger
from quire.frontend.text.content_forms import (
    MEDIA_TYPE,
    ContentForms,
    Form,
    MediaMark,
    Message,
    Part,
    Placeholders,
    written,
)
from quire.frontend.text.template_sandbox import SandboxedTemplate

logger = get_logger(__name__)

_TEXT_FIELDS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt")
_END_MARK = "\ue0fe\ue0ff "
"""Marks the end of the last message while it is rendered: private-use characters, which templates do not contain, and
a space, which shows whether the template trims messages."""

PROBE_SECONDS = 1.0
"""Time limit of a rendering that finds out which form of contents a template reads."""


def read_template(source: str) -> str:
    """The text of a template, read from its file unless `source` is a template itself.

    Raises:
        ConfigError: neither a readable file nor Jinja text.
    """
    text = source
    try:
        if not any(mark in text for mark in ("{{", "{%", "\n")):
            text = Path(text).read_text(encoding="utf-8-sig")
        ChatTemplate(text, {})
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--chat-template: cannot read {source!r}: {getattr(error, 'strerror', None) or error}."
        ) from None
    except ParameterError as error:
        raise ConfigError(f"--chat-template: {error}") from None
    return text


class ChatTemplate:
    """A compiled template.

    Args:
        source: Jinja text.
        special_tokens: the tokenizer's named tokens, for templates that write `bos_token` and the like.

    Raises:
        ParameterError: the source is not valid Jinja, or too long.
    """

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        self._template = SandboxedTemplate(source)
        self._special_tokens = special_tokens
        self._forms = ContentForms()

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        content_format: Literal["auto", "string", "openai"] = "auto",
        variables: dict[str, Any] | None = None,
        placeholders: Placeholders = Placeholders(),
    ) -> str:
        """Renders the prompt.

        Args:
            add_generation_prompt: end the prompt with the beginning of the assistant's turn.
            continue_final_message: leave the last message open, so that the model continues it.
            content_format: the form of contents; "auto" finds which the template reads, see `ContentForms`.
            variables: more variables for the template, such as `enable_thinking`.
            placeholders: what stands for images where a content is a string.

        Raises:
            ParameterError: the messages cannot be rendered; the text includes the template's own message, if any.
        """
        if continue_final_message and add_generation_prompt:
            raise ParameterError(
                "continue_final_message and add_generation_prompt exclude each other; set one to false.",
                param="continue_final_message",
            )
        for name in set(variables or {}) & set(_RESERVED):
            raise ParameterError(f"chat_template_kwargs must not set {name!r}.", param="chat_template_kwargs")
        plain = _plain(list(messages))
        for index, message in enumerate(plain):
            _prepare(message, index)
        context = {
            **self._special_tokens,
            **(_plain(variables) if variables else {}),
            "tools": _plain(tools) if tools else None,
            "documents": _plain(documents) if documents else None,
            "add_generation_prompt": add_generation_prompt,
        }
        self._write_contents(plain, content_format, context, placeholders)
        if continue_final_message:
            _mark_end(plain)
        try:
            prompt = self._template.render({**context, "messages": plain})
        except Exception as error:  # a template may raise anything, and only this request fails
            raise ParameterError(f"The chat template refused the messages: {error}", param="messages") from error
        return _cut_at_mark(prompt) if continue_final_message else prompt

    def _write_contents(
        self,
        messages: list[Message],
        content_format: Literal["auto", "string", "openai"],
        context: dict[str, Any],
        placeholders: Placeholders,
    ) -> None:
        """Gives each content, a string or a list of texts and marks of images, the form that the template reads."""

        def render(others: Sequence[Message]) -> str:
            return self._template.render({**context, "messages": others}, seconds=PROBE_SECONDS)

        forms = []
        for index, message in enumerate(messages):
            content = message["content"]
            parts: list[Part] = content if isinstance(content, list) else [content]
            texts = [each for each in parts if isinstance(each, str)]
            form: Form = "string"
            if content_format == "openai" and isinstance(content, list):
                form = "parts"
            elif content_format != "string" and any(parts):
                form = self._forms.choose(messages, index, texts, render)
            forms.append(written(parts, form, placeholders))
        for message, content in zip(messages, forms, strict=True):
            message["content"] = content


def _prepare(message: Message, index: int) -> None:
    """Gives `message`, a plain copy, what templates expect; a content becomes a string or a list of texts and marks."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ParameterError(f"messages[{index}] must be an object with a role.", param="messages")
    content = message.get("content")
    if content is None:
        message["content"] = ""
    elif isinstance(content, list):
        message["content"] = [_part(part, f"messages[{index}].content[{i}]") for i, part in enumerate(content)]
    elif not isinstance(content, str):
        raise ParameterError(f"messages[{index}].content must be a string or a list of parts.", param="messages")
    reasoning = message.get("reasoning_content", message.get("reasoning"))
    if reasoning is not None:
        message["reasoning_content"] = message["reasoning"] = reasoning
    if message.get("tool_calls"):
        _parse_arguments(message["tool_calls"], index)
    else:
        message.pop("tool_calls", None)


def _plain(value: Any) -> Any:
    """A copy of JSON types only, so that a template can neither call methods nor change the caller's data."""
    try:
        return msgspec.json.decode(msgspec.json.encode(value))
    except UnicodeEncodeError as error:
        raise ParameterError(f"The messages are no valid Unicode: {error.reason}.", param="messages") from None
    except (TypeError, msgspec.MsgspecError) as error:
        raise ParameterError(f"The messages must be plain JSON data: {error}.", param="messages") from None


def _part(part: Any, where: str) -> Part:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == MEDIA_TYPE:
        return MediaMark(str(part.get("modality")))
    if not isinstance(kind, str) or kind not in _TEXT_FIELDS:
        raise ParameterError(f"{where} is of type {kind!r}, but this model reads text only.", param="messages")
    text = part.get(_TEXT_FIELDS[kind])
    if not isinstance(text, str):
        raise ParameterError(f"{where}.{_TEXT_FIELDS[kind]} must be a string.", param="messages")
    return text


def _parse_arguments(calls: Any, index: int) -> None:
    """Replaces each call's arguments, JSON text in OpenAI's protocol, by the object that templates take."""
    if not isinstance(calls, list):
        raise ParameterError(f"messages[{index}].tool_calls must be a list.", param="messages")
    for i, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ParameterError(
                f"messages[{index}].tool_calls[{i}] must hold a function with a name.", param="messages"
            )
        arguments = _as_object(function.get("arguments"))
        if arguments is None:
            logger.warning("messages[%d].tool_calls[%d]: arguments that are no JSON object are left out", index, i)
        function["arguments"] = arguments or {}


def _as_object(arguments: Any) -> dict[str, Any] | None:
    """A call's arguments as an object, empty if there are none; None if they are not an object.

    A model may write malformed arguments, or be cut off. Such a call stays in its conversation, so refusing it would
    end the conversation.
    """
    if isinstance(arguments, str) and arguments.strip():
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    elif not arguments:
        return {}
    return arguments if isinstance(arguments, dict) else None


# ------------------------------------------------------------------------------------------- continue_final_message


def _mark_end(messages: list[Message]) -> None:
    content = messages[-1]["content"] if messages else None
    if isinstance(content, str) and content:
        messages[-1]["content"] = content + _END_MARK
    elif isinstance(content, list) and content:
        content[-1]["text"] += _END_MARK
    else:
        raise ParameterError(
            "continue_final_message needs a last message with text in it to go on from.", param="messages"
        )


def _cut_at_mark(prompt: str) -> str:
    before, mark, after = prompt.rpartition(_END_MARK.rstrip())
    if not mark:
        raise ParameterError(
            "continue_final_message: the chat template leaves the last message out.", param="continue_final_message"
        )
    return before if after.startswith(" ") else before.rstrip()
