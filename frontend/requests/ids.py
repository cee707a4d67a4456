"""Ids of requests: the client's, cut to a bound, and the engine's, which is unique."""

import uuid

MAX_ID_CHARACTERS = 200
"""Longest id that a client may choose; the rest is cut off."""


_UNIQUE_DIGITS = 8


def engine_id(reply_id: str, prompt_index: int = 0) -> str:
    """Id of one prompt inside the engine: unique, even when a client uses its id twice."""
    return f"{reply_id}-{prompt_index}-{uuid.uuid4().hex[:_UNIQUE_DIGITS]}"


def reply_id_of(engine_id: str) -> str:
    """The id of the reply to which a request inside the engine belongs."""
    return engine_id.rsplit("-", 2)[0]
