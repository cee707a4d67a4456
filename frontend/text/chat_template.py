"""Renders a conversation as a prompt with the checkpoint's Jinja template, as Transformers does.

Templates are not trusted: they run in a sandbox (`template_sandbox.py`) and get only plain JSON data.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from jinja2 import nodes

from quire.core.errors import ConfigError, ParameterError
from quire.core.logging import get_logger
from quire.frontend.text.template_sandbox import SandboxedTemplate

logger = get_logger(__name__)

ContentFormat = Literal["string", "openai"]
"""The type of a message's content that a template takes: a string, or OpenAI's list of parts."""

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

Message = dict[str, Any]


def read_template(source: str) -> str:
    """The text of a template, read from its file unless `source` is a template itself.

    Raises:
        ConfigError: neither a readable file nor Jinja text.
    """
    text = source
    try:
        if not any(mark in text for mark in ("{{", "{%", "\n")):
            text = Path(text).read_text(encoding="utf-8")
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
        tree = self._template.tree
        self._special_tokens = special_tokens
        self.content_format: ContentFormat = "openai" if _iterates_over_content(tree) else "string"
        self._accepts_strings = any(node.name == "string" for node in tree.find_all(nodes.Test))

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
    ) -> str:
        """Renders the prompt.

        Args:
            add_generation_prompt: end the prompt with the beginning of the assistant's turn.
            continue_final_message: leave the last message open, so that the model continues it.
            variables: more variables for the template, such as `enable_thinking`.

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
        if content_format == "auto":
            content_format = self.content_format
        plain = _plain(list(messages))
        for index, message in enumerate(plain):
            self._prepare(message, index, content_format)
        if continue_final_message:
            _mark_end(plain)
        context = {
            **self._special_tokens,
            **(_plain(variables) if variables else {}),
            "messages": plain,
            "tools": _plain(tools) if tools else None,
            "documents": _plain(documents) if documents else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            prompt = self._template.render(context)
        except Exception as error:  # a template may raise anything, and only this request fails
            raise ParameterError(f"The chat template refused the messages: {error}", param="messages") from error
        return _cut_at_mark(prompt) if continue_final_message else prompt

    def _prepare(self, message: Message, index: int, content_format: ContentFormat) -> None:
        """Gives `message`, a plain copy, the form that templates expect."""
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ParameterError(f"messages[{index}] must be an object with a role.", param="messages")
        content = message.get("content")
        if content is None:
            message["content"] = ""
        elif isinstance(content, list):
            texts = [_part_text(part, f"messages[{index}].content[{i}]") for i, part in enumerate(content)]
            if content_format == "string":
                message["content"] = "\n".join(texts)
            else:
                message["content"] = [{"type": "text", "text": text} for text in texts]
        elif not isinstance(content, str):
            raise ParameterError(f"messages[{index}].content must be a string or a list of parts.", param="messages")
        elif content_format == "openai" and not self._accepts_strings:
            message["content"] = [{"type": "text", "text": content}]
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


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
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


# ------------------------------------------------------------------------------------------------ content detection


def _iterates_over_content(tree: nodes.Template) -> bool:
    """Whether the template loops over a message's content, directly or through a variable or macro argument."""
    names = {"content"}  # the usual name of a macro's argument
    for assignment in tree.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name) and any(map(_is_content, _operands(assignment.node))):
            names.add(assignment.target.name)
    loops = [operand for loop in tree.find_all(nodes.For) for operand in _operands(loop.iter)]
    return any(_is_content(loop) or (isinstance(loop, nodes.Name) and loop.name in names) for loop in loops)


def _operands(node: nodes.Node | None) -> Iterator[nodes.Node]:
    """The expressions whose value `node` may have, without filters and conditions."""
    if isinstance(node, nodes.Filter):
        yield from _operands(node.node)
    elif isinstance(node, nodes.CondExpr):
        yield from _operands(node.expr1)
        yield from _operands(node.expr2)
    elif node is not None:
        yield node


def _is_content(node: nodes.Node) -> bool:
    """Whether `node` is `x.content` or `x['content']`."""
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"
