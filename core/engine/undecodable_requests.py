"""Finds the sequences of a request that cannot be decoded, so that their failure can be reported."""

from typing import Any

import msgspec

from quire.core.wire.protocol import EngineRequest


def ids_in_unreadable(payload: bytes) -> list[str]:
    """The ids of the sequences in an `EngineRequest` whose other fields cannot be decoded; otherwise none."""
    try:
        tag, sequences, *_ = msgspec.msgpack.decode(payload)
        if tag != EngineRequest.__struct_config__.tag:
            return []
        return [request_id for request_id in map(_first, sequences) if isinstance(request_id, str)]
    except (TypeError, ValueError, msgspec.DecodeError, RecursionError):
        return []


def _first(sequence: Any) -> Any:
    return sequence[0] if isinstance(sequence, list) and sequence else None
