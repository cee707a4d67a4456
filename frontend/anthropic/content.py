"""Blocks of content, as Anthropic writes them, and the chat messages that templates read."""

import json
from typing import Any

from quire.core.errors import ParameterError
from quire.frontend.chat.media_parts import file_part, image_part

_MEDIA = ("image", "document", "container_upload")
"""Types of blocks that have no text; images are read in messages of the user alone."""
_UNREADABLE = "redacted_thinking"
"""Type of encrypted thinking. Only the server that encrypted it can read it; this server encrypts none. A client that
changes servers within a conversation sends it with the rest of the turn. The prompt leaves it out, as in vLLM: a
refusal would end such conversations, and a model cannot read the cipher text."""


_BILLING = "x-anthropic-billing-header"
"""Beginning of a block that Claude Code adds to the system message. It differs between requests, so that no prefix of a
conversation would be found in the cache."""


def system_message(system: str | list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """The system message in a list, which is empty without one. Raises ParameterError."""
    if isinstance(system, list):
        system = [block for block in system if not str(block.get("text")).startswith(_BILLING)]
    if not system:
        return []
    return [{"role": "system", "content": _joined_text(system, "system")}]


def with_one_system_message(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The chat messages with all system messages joined into a first one, as many templates need it."""
    texts = [each["content"] for each in messages if each["role"] == "system"]
    joined = "\n\n".join(text if isinstance(text, str) else _joined_text(text, "messages") for text in texts)
    others = [each for each in messages if each["role"] != "system"]
    return [{"role": "system", "content": joined}, *others] if texts else others


def is_open_turn(messages: list[dict[str, Any]]) -> bool:
    """True if the answer continues the last message, which then is a turn of the assistant that ends in text."""
    last = messages[-1] if messages else {}
    return last.get("role") == "assistant" and bool(last.get("content")) and not last.get("tool_calls")


def to_messages(role: str, content: str | list[dict[str, Any]], index: int) -> list[dict[str, Any]]:
    """The chat messages of one turn. Each result of a tool in a user's turn becomes a separate message.

    Raises:
        ParameterError: a block that is malformed, or of a kind that this model cannot read.
    """
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    where = f"messages[{index}].content"
    results: list[dict[str, Any]] = []
    texts: list[dict[str, Any]] = []  # and images
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for number, block in enumerate(content):
        at = f"{where}[{number}]"
        kind = block.get("type")
        if kind == "text":
            texts.append(_text_part(_string(block, "text", at)))
        elif kind in _READ and role == "user":
            texts += _READ[kind](block, at)
        elif kind == "thinking" and role == "assistant":
            thoughts.append(_string(block, "thinking", at))
        elif kind == "tool_use" and role == "assistant":
            calls.append(_call(block, at))
        elif kind == "tool_result" and role == "user":
            result, shown = _result(block, at)
            results.append(result)
            texts += shown
        elif kind == _UNREADABLE and role == "assistant":
            _string(block, "data", at)
        else:
            why = "but this model reads text only" if kind in _MEDIA else f"which a message of {role} cannot hold"
            raise ParameterError(f"{at} is of type {kind!r}, {why}.", param="messages")
    if not texts and not thoughts and not calls:
        return results or [{"role": role, "content": ""}]
    message: dict[str, Any] = {"role": role, "content": _simple(texts) if texts else None}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [*results, message]


def _simple(texts: list[dict[str, Any]]) -> Any:
    """A single text as a string, which every template can read; else the parts unchanged."""
    return texts[0]["text"] if len(texts) == 1 and texts[0]["type"] == "text" else texts


def _image(block: dict[str, Any], at: str) -> list[dict[str, Any]]:
    """An image as a part of a chat message; its source is an address, or data."""
    return [image_part(_address(block, at), "image", at, "source")]


def _document(block: dict[str, Any], at: str) -> list[dict[str, Any]]:
    """A document as parts of a chat message: its title and context, and its text or its pages."""
    citations = block.get("citations")
    if citations is not None and not (isinstance(citations, dict) and citations.get("enabled") in (None, False)):
        raise ParameterError(
            f"{at}.citations are not there: answers cite nothing here. Leave it out, or send it without enabled.",
            param="messages",
        )
    head = [_string(block, name, at) for name in ("title", "context") if block.get(name) is not None]
    source, param = block.get("source"), f"{at}.source"
    kind = source.get("type") if isinstance(source, dict) else None
    if isinstance(source, dict) and kind == "text":
        return [_text_part("\n\n".join([*head, _string(source, "data", param)]))]
    lead = [_text_part("\n\n".join(head))] if head else []
    if isinstance(source, dict) and kind == "content":
        return lead + _parts(source.get("content"), f"{param}.content")
    return [*lead, file_part(_address(block, at), "document", at, "source")]


_READ = {"image": _image, "document": _document}
"""Blocks that a user shows, by type."""


def _address(block: dict[str, Any], at: str) -> str | None:
    """The address of a block's source, or its data as one; None where it has neither."""
    source, param = block.get("source"), f"{at}.source"
    kind = source.get("type") if isinstance(source, dict) else None
    if isinstance(source, dict) and kind == "url":
        return _string(source, "url", param)
    if isinstance(source, dict) and kind == "base64":
        return f"data:{_string(source, 'media_type', param)};base64,{_string(source, 'data', param)}"
    if kind == "file":
        raise ParameterError(f"{param} names a file, and none are kept here; send its data.", param="messages")
    return None


def _parts(content: Any, at: str) -> list[dict[str, Any]]:
    """A string, or blocks of text and what a user shows, as parts of a chat message."""
    if isinstance(content, str):
        return [_text_part(content)]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise ParameterError(f"{at} must be a string or a list of blocks.", param="messages")
    parts = []
    for number, block in enumerate(content):
        kind, where = block.get("type"), f"{at}[{number}]"
        if kind == "text":
            parts.append(_text_part(_string(block, "text", where)))
        elif kind == "image":
            parts += _image(block, where)
        else:
            raise ParameterError(f"{where} is of type {kind!r}; it must be text or image.", param="messages")
    return parts


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _call(block: dict[str, Any], at: str) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise ParameterError(f"{at}.input must be an object.", param="messages")
    function = {"name": _string(block, "name", at), "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": _string(block, "id", at), "type": "function", "function": function}


def _result(block: dict[str, Any], at: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The message of a tool, and the images and documents that it shows.

    These stand in the user's message that follows, because templates write results of tools as strings. The tool's has
    `is_error` for templates that show failures.
    """
    content, where = block.get("content") or "", f"{at}.content"
    shown: list[dict[str, Any]] = []
    if isinstance(content, list):
        for number, each in enumerate(content):
            if isinstance(each, dict) and each.get("type") in _READ:
                shown += _READ[each["type"]](each, f"{where}[{number}]")
        content = [each for each in content if not (isinstance(each, dict) and each.get("type") in _READ)]
    text = _joined_text(content, where)
    failed = block.get("is_error")
    if not isinstance(failed, bool | None):
        raise ParameterError(f"{at}.is_error must be true or false.", param="messages")
    message = {"role": "tool", "tool_call_id": _string(block, "tool_use_id", at), "content": text}
    return ({**message, "is_error": True} if failed else message), shown


def _joined_text(content: Any, at: str) -> str:
    """A string, or blocks of text, as one string."""
    if isinstance(content, str):
        return content
    param = at.partition("[")[0]
    if not isinstance(content, list):
        raise ParameterError(f"{at} must be a string or a list of blocks.", param=param)
    texts = []
    for number, block in enumerate(content):
        if not isinstance(block, dict) or block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise ParameterError(f"{at}[{number}] must be a block of text: this model reads text only.", param=param)
        texts.append(block["text"])
    return "\n".join(texts)


def _string(block: dict[str, Any], field: str, at: str) -> str:
    value = block.get(field)
    if not isinstance(value, str):
        raise ParameterError(f"{at}.{field} must be a string.", param="messages")
    return value
