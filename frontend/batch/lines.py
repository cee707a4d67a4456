"""Lines of a batch's input: their ids and digests."""

import hashlib
import json

import msgspec
from msgspec import Struct

DIGEST_BYTES = 8


class _PartialRequest(Struct):
    """The id of a line that is JSON, but perhaps no valid request."""

    custom_id: str | None = None


def digest_of(line: bytes) -> str:
    """The digest of a line, without the spaces around it."""
    return hashlib.blake2b(line.strip(), digest_size=DIGEST_BYTES).hexdigest()


def read_custom_id(line: bytes) -> str | None:
    """The line's custom_id; None when the line cannot be read."""
    try:
        return msgspec.json.decode(line, type=_PartialRequest).custom_id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass
    try:  # the standard library reads some lines that msgspec refuses, such as those with lone surrogates
        custom_id = json.loads(line)["custom_id"]
        return custom_id if custom_id.isprintable() else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def key_of(number: int, line: bytes) -> str:
    """The key by which a resumed run finds the answer to the line."""
    return read_custom_id(line) or line_id(number)


def line_id(number: int) -> str:
    """Id of the answer to a line without a custom_id, the same in every run."""
    return f"batch_req_line_{number}"
