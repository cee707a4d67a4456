"""Ids of requests inside the engine, which identify the reply."""

import uuid

_UNIQUE_DIGITS = 8


def engine_id(reply_id: str, prompt_index: int = 0) -> str:
    """Id of one prompt inside the engine: unique, even when a client uses its id twice."""
    return f"{reply_id}-{prompt_index}-{uuid.uuid4().hex[:_UNIQUE_DIGITS]}"


def reply_id_of(engine_id: str) -> str:
    """The id of the reply to which a request inside the engine, or one of its sequences, belongs."""
    return engine_id.rsplit("-", 2)[0]
