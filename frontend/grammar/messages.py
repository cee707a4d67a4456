"""What the frontend and its helper process say to each other: length-prefixed MessagePack over a socket."""

import struct

import msgspec
from msgspec import Struct

from quire.frontend.grammar.constraint import Constraint

LENGTH = struct.Struct("<I")


class Setup(Struct, array_like=True, tag="setup"):
    """The first message: the model's tokens, and how much memory and processor time a compilation may use."""

    tokenizer_folder: str
    vocab_size: int
    end_token_ids: list[int]
    limit_bytes: int
    limit_cpu_seconds: float


class Compile(Struct, array_like=True, tag="compile"):
    """Answered with `Compiled` or `Refused`."""

    constraint: Constraint
    known_vocabularies: list[str]  # by name; those that the frontend has already


class Compiled(Struct, array_like=True, tag="compiled"):
    """A grammar, and the vocabulary that it was compiled for."""

    backend: str
    data: bytes
    vocabulary_name: str
    vocabulary: bytes  # a `protocol.Vocabulary`; empty when it is known
    is_large: bool  # the helper has grown, and should be replaced


class Refused(Struct, array_like=True, tag="refused"):
    """No backend could do it; why, for the client."""

    message: str
    is_large: bool = False


Question = Setup | Compile
Answer = Compiled | Refused


def framed(message: Struct) -> bytes:
    """A message as it goes over the socket."""
    data = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(data)) + data
