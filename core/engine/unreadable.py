"""Reads so much of a message that cannot be read as tells who waits for it."""

from typing import Any

import msgspec

from quire.core.wire.protocol import EngineRequest


def ids_in_unreadable(payload: bytes) -> list[str]:
    """The ids of the sequences that an `EngineRequest` brings whose other fields cannot be read; otherwise none."""
    try:
        tag, sequences, *_ = msgspec.msgpack.decode(payload)
        if tag != EngineRequest.__struct_config__.tag:
            return []
        return [request_id for request_id in map(_first, sequences) if isinstance(request_id, str)]
    except (TypeError, ValueError, msgspec.DecodeError, RecursionError):
        return []


def _first(sequence: Any) -> Any:
    return sequence[0] if isinstance(sequence, list) and sequence else None
