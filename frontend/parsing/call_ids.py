"""Ids of calls: random ids for answers, and ids that Mistral's templates accept."""

import hashlib
import secrets
import string
from typing import Any

CHAT_PREFIX = "chatcmpl-tool-"
"""The prefix of ids in chat completions; the same as vLLM's."""

_ALPHANUMERIC = string.digits + string.ascii_letters
_MISTRAL_CHARACTERS = 9


def random_call_id(prefix: str = CHAT_PREFIX) -> str:
    """A unique id, after a protocol's prefix."""
    return prefix + secrets.token_hex(16)


def mistral_call_id() -> str:
    """A unique id of nine letters or digits: Mistral's templates accept no other form."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(_MISTRAL_CHARACTERS))


def with_mistral_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with call ids in the form that Mistral's templates accept.

    Equal ids stay equal. Ids of the right form stay unchanged. Malformed calls are left to the template.
    """
    return [_with_mistral_ids(each) if "tool_calls" in each or "tool_call_id" in each else each for each in messages]


def _with_mistral_ids(message: dict[str, Any]) -> dict[str, Any]:
    message = dict(message)
    if isinstance(message.get("tool_call_id"), str):
        message["tool_call_id"] = _shortened(message["tool_call_id"])
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        message["tool_calls"] = [_with_mistral_id(call) for call in calls]
    return message


def _with_mistral_id(call: Any) -> Any:
    if isinstance(call, dict) and isinstance(call.get("id"), str):
        return {**call, "id": _shortened(call["id"])}
    return call


def _shortened(call_id: str) -> str:
    if len(call_id) == _MISTRAL_CHARACTERS and call_id.isascii() and call_id.isalnum():
        return call_id
    number = int.from_bytes(hashlib.sha256(call_id.encode("utf-8", "replace")).digest(), "little")
    letters = []
    for _ in range(_MISTRAL_CHARACTERS):
        number, index = divmod(number, len(_ALPHANUMERIC))
        letters.append(_ALPHANUMERIC[index])
    return "".join(letters)
