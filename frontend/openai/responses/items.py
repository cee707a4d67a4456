"""Items of a conversation, as the Responses API writes them, and the chat messages that templates read."""

import base64
import binascii
from collections.abc import Iterator, Sequence
from typing import Any

from quire.core.errors import ParameterError
from quire.frontend.chat.custom_tools import arguments_of
from quire.frontend.chat.media_parts import audio_part, file_part, image_part
from quire.frontend.openai.responses.tools import flat_name

ROLES = ("user", "assistant", "system", "developer")
"""Roles of messages; results of tools are items of another type."""

SUMMARY_HEADING = "Summary of the conversation so far:"
"""Comes before the text of a compaction item in the prompt."""

_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_HOSTED = (
    *("web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call", "computer_call"),
    *("computer_call_output", "mcp_call", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response"),
    *("tool_search_call", "tool_search_output"),
)
"""Types of items that tools of another server left in a conversation. The prompt leaves them out."""

_TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")
_MEDIA_PARTS = ("input_image", "input_audio", "input_file")


def input_items(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`input` as a list of items."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    return given


def ignored_items(items: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The items that the prompt leaves out."""
    return (f"input[{index}].{item['type']}" for index, item in enumerate(items) if item.get("type") in _HOSTED)


def to_messages(
    items: Sequence[dict[str, Any]], instructions: str | None = None, *, num_previous: int = 0
) -> list[dict[str, Any]]:
    """Chat messages. Reasoning, text and calls that follow each other are one turn of the assistant.

    Args:
        num_previous: leading items that the client did not send with this request.

    Raises:
        ParameterError: an item that is malformed, or of a kind that this server does not know.
    """
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    turn: dict[str, Any] | None = None  # the assistant's turn, which further items may extend
    for index, item in enumerate(items, start=-num_previous):
        kind = item.get("type", "message")
        if kind == "reasoning":
            turn = _add(messages, {"role": "assistant", "content": None, "reasoning_content": _reasoning(item, index)})
        elif kind == "message" and item.get("role") == "assistant":
            text = _text(item.get("content"), index)
            if turn is None or turn["content"] is not None or turn.get("tool_calls"):
                turn = _add(messages, {"role": "assistant", "content": text})
            else:
                turn["content"] = text
        elif kind == "function_call":
            turn = turn or _add(messages, {"role": "assistant", "content": None})
            turn.setdefault("tool_calls", []).append(_call(item, index))
        elif kind == "custom_tool_call":
            turn = turn or _add(messages, {"role": "assistant", "content": None})
            turn.setdefault("tool_calls", []).append(_custom_call(item, index))
        elif kind in _HOSTED:
            continue
        else:
            turn = None
            messages.append(_message(item, kind, index))
    was_compacted = any(item.get("type") == "compaction" for item in items)
    return joined(messages) if was_compacted else messages


def joined(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Joins consecutive messages of the user, because some templates refuse two in a row."""
    out: list[dict[str, Any]] = []
    for message in messages:
        if out and message["role"] == out[-1]["role"] == "user":
            out[-1] = {**out[-1], "content": _both(out[-1]["content"], message["content"])}
        else:
            out.append(message)
    return out


def _both(one: Any, other: Any) -> Any:
    """Two contents as one: strings, or lists of parts."""
    if isinstance(one, str) and isinstance(other, str):
        return f"{one}\n\n{other}"
    return [part for each in (one, other) for part in ([_text_part(each)] if isinstance(each, str) else each)]


def encrypt(text: str) -> str:
    """Reasoning or a summary as `encrypted_content`. It is not secret; clients only pass it on unread."""
    return base64.b64encode(text.encode()).decode("ascii")


def _decrypt(item: dict[str, Any], index: int) -> str:
    try:
        return base64.b64decode(item.get("encrypted_content") or "", validate=True).decode()
    except (binascii.Error, ValueError, TypeError):
        raise _refusal(index, "has an encrypted_content that is not from this server") from None


def _message(item: dict[str, Any], kind: Any, index: int) -> dict[str, Any]:
    """A message of any role but the assistant's, a tool's result, or the summary of a compaction."""
    if kind == "message":
        if item.get("role") not in ROLES:
            raise _refusal(index, f"must have a role out of {', '.join(ROLES)}; got {item.get('role')!r}")
        return {"role": item["role"], "content": _content(item.get("content"), index)}
    if kind in _OUTPUTS:
        call_id = _string(item, "call_id", index)
        return {"role": "tool", "tool_call_id": call_id, "content": _text(item.get("output"), index)}
    if kind == "compaction":
        return {"role": "user", "content": f"{SUMMARY_HEADING}\n\n{_decrypt(item, index)}"}
    if kind == "item_reference":
        raise _refusal(index, "is a reference; send the item itself, or continue with previous_response_id")
    raise _refusal(index, f"is of type {kind!r}, which is not supported")


def _add(messages: list[dict[str, Any]], message: dict[str, Any]) -> dict[str, Any]:
    messages.append(message)
    return message


def _call(item: dict[str, Any], index: int) -> dict[str, Any]:
    return _called(item, _string(item, "arguments", index), index)


def _custom_call(item: dict[str, Any], index: int) -> dict[str, Any]:
    return _called(item, arguments_of(_string(item, "input", index)), index)


def _called(item: dict[str, Any], arguments: str, index: int) -> dict[str, Any]:
    namespace = None if item.get("namespace") is None else _string(item, "namespace", index)
    function = {"name": flat_name(_string(item, "name", index), namespace), "arguments": arguments}
    return {"id": _string(item, "call_id", index), "type": "function", "function": function}


def _reasoning(item: dict[str, Any], index: int) -> str:
    for field in ("content", "summary"):
        if item.get(field):
            return _text(item[field], index)
    return _decrypt(item, index)


def _content(content: Any, index: int) -> str | list[dict[str, Any]]:
    """A string, or a list of parts where there are images or sounds among them."""
    if not isinstance(content, list) or not any(map(_is_media, content)):
        return _text(content, index)
    return [
        _medium(part, f"input[{index}].content[{number}]") if _is_media(part) else _text_part(_text([part], index))
        for number, part in enumerate(content)
    ]


def _is_media(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in _MEDIA_PARTS


def _medium(part: dict[str, Any], at: str) -> dict[str, Any]:
    """An image, a sound or a file as a part of a chat message."""
    kind = part["type"]
    if kind == "input_audio":
        return audio_part(part.get("input_audio"), kind, at, "input_audio")
    if part.get("file_id") is not None:
        field = "file_data" if kind == "input_file" else "image_url"
        raise ParameterError(f"{at} has a file_id, and no files are kept here; send its {field}.", param="input")
    if kind == "input_file":
        return _file(part, at)
    return image_part(part.get("image_url"), "input_image", at, "image_url")


def _file(part: dict[str, Any], at: str) -> dict[str, Any]:
    url, data = part.get("file_url"), part.get("file_data")
    if url is None:
        given = {"file_data": data, "filename": part.get("filename")}
        return file_part(given, "input_file", at, "file_data")
    if data is not None or not isinstance(url, str):
        raise ParameterError(f"{at} must have file_data, or a file_url that is an address.", param="input")
    return file_part(url, "input_file", at, "file_url")


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _text(content: Any, index: int) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _refusal(index, "must have a string or a list of parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in _TEXT_PARTS:
            raise _refusal(index, f"has a part of type {kind!r}, but this model reads text only")
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise _refusal(index, "has a part whose text is no string")
        texts.append(text)
    return "".join(texts)


def _string(item: dict[str, Any], field: str, index: int) -> str:
    value = item.get(field)
    if not isinstance(value, str):
        raise _refusal(index, f"needs a string {field!r}")
    return value


def _refusal(index: int, what: str) -> ParameterError:
    return ParameterError(f"input[{index}] {what}.", param="input")
