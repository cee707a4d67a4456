"""Ids of calls: those that answers give, and those that a template takes."""

import hashlib
import secrets
import string
from typing import Any

CHAT_PREFIX = "chatcmpl-tool-"
"""How ids begin in chat completions, as clients see them from vLLM."""

_ALPHANUMERIC = string.digits + string.ascii_letters
_MISTRAL_CHARACTERS = 9


def random_call_id(prefix: str = CHAT_PREFIX) -> str:
    """An id that no other call has, in the form of a protocol."""
    return prefix + secrets.token_hex(16)


def mistral_call_id() -> str:
    """Nine letters or digits, which is all that Mistral's templates accept."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(_MISTRAL_CHARACTERS))


def with_mistral_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with ids that Mistral's templates accept, whichever server or client made them up.

    Equal ids stay equal, and those of the right form stay as they are. Malformed calls are left to the template.
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
