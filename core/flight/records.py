"""The records of a flight recorder, and their form in a file.

A file is a sequence of records. Each has its kind, the time and a payload; the first is a `Preamble`, so that every
file can be read alone.
"""

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

import msgspec
from msgspec import Struct

from quire.core.config.resolved import EngineConfig
from quire.core.wire.protocol import EngineReady, StepPlan

VERSION = 1
HEAD = struct.Struct("<IBd")
"""Bytes of the payload, kind, CLOCK_MONOTONIC seconds."""
SUFFIX = ".flight"


class Kind(IntEnum):
    PREAMBLE = 0  # `Preamble`
    INPUT = 1  # an `EngineInput`: a request, or requests to abort
    PLAN = 2  # `Planned`
    RESULT = 3  # `Answered`
    ENDED = 4  # `Ended`
    FAULT = 5  # text
    VOCABULARY = 6  # `NamedVocabulary`
    CUT = 7  # `Cut`: a record that is too large


class Preamble(Struct, array_like=True):
    """The engine that recorded, and the place of a file among its others."""

    version: int
    sequence: int  # from 0
    unix_time: float  # of the same moment as `monotonic`
    monotonic: float
    pid: int
    config: EngineConfig
    ready: EngineReady


class Planned(Struct, array_like=True):
    """A plan, and the ids of the requests that enter their slots with it."""

    plan: StepPlan
    admitted: list[str]


class Answered(Struct, array_like=True):
    """The part of a `StepResult` by which one run is compared with another."""

    step_id: int
    token_ids: list[list[int]]


class Ended(Struct, array_like=True):
    """Requests that ended in a step, and why."""

    requests: list[tuple[str, str]]


class NamedVocabulary(Struct, array_like=True):
    """Grammars name a vocabulary by the path of a memory file; this is the file's own name."""

    path: str
    name: str


class Cut(Struct, array_like=True):
    """A record whose payload was left out."""

    kind: Kind
    num_bytes: int


class Record(NamedTuple):
    """A record as it lies in a file."""

    kind: Kind
    time: float  # CLOCK_MONOTONIC seconds
    payload: memoryview


def read_records(data: bytes) -> Iterator[Record]:
    """The records in the content of a file, up to the first that is cut short: the engine was killed as it wrote."""
    view, at = memoryview(data), 0
    while at + HEAD.size <= len(view):
        length, kind, time = HEAD.unpack_from(view, at)
        at += HEAD.size
        if at + length > len(view) or kind not in _KINDS:
            return
        yield Record(Kind(kind), time, view[at : at + length])
        at += length


_KINDS = frozenset(Kind)


def read_preamble(data: bytes) -> Preamble | None:
    """The preamble of a file's content; None if it is no file of this version."""
    first = next(read_records(data), None)
    if first is None or first.kind is not Kind.PREAMBLE:
        return None
    try:
        preamble = msgspec.msgpack.decode(first.payload, type=Preamble)
    except (ValueError, msgspec.MsgspecError, RecursionError):
        return None
    return preamble if preamble.version == VERSION else None
