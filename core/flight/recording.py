"""Reads the files of a flight recorder."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from quire.core.errors import ConfigError
from quire.core.flight.records import (
    SUFFIX,
    Answered,
    Cut,
    Ended,
    Kind,
    NamedVocabulary,
    Planned,
    Preamble,
    Record,
    read_preamble,
    read_records,
)
from quire.core.wire.protocol import AbortReplies, AbortRequests, EngineRequest

RecordedInput = EngineRequest | AbortRequests | AbortReplies
Event = RecordedInput | Planned | Answered | Ended | NamedVocabulary | Cut | str
"""A record's content; a fault is a text."""


class Recording:
    """The records of one engine, in order.

    Args:
        files: the engine's files in order; one may hold several of the recorder's.

    Attributes:
        preamble: of the first file.
        is_whole: it begins with the engine's first step.
    """

    def __init__(self, preamble: Preamble, files: list[Path]) -> None:
        self.preamble = preamble
        self.files = files
        self.is_whole = preamble.sequence == 0

    def events(self) -> Iterator[tuple[float, Event]]:
        """(seconds since the start of the recording engine, content) of each record. Raises ConfigError."""
        for path in self.files:
            for record in read_records(_read(path)):
                if record.kind is not Kind.PREAMBLE:
                    yield record.time - self.preamble.monotonic, _content(record, path)


def find_recordings(place: Path) -> list[Recording]:
    """The recordings in a folder, or in a file: one for each engine, the oldest first.

    Raises:
        ConfigError: there is none, or a file is damaged.
    """
    if not place.exists():
        raise ConfigError(
            f"There is no {str(place)!r}. Name a folder of --flight-recorder, or the file that the log names."
        )
    if place.is_file():
        return [open_files([place])]
    found: dict[tuple[int, float], list[tuple[int, Path]]] = {}
    for path in sorted(place.glob(f"*{SUFFIX}")):
        preamble = read_preamble(_read(path))
        if preamble is not None:
            found.setdefault((preamble.pid, preamble.monotonic), []).append((preamble.sequence, path))
    if not found:
        raise ConfigError(f"{place} has no files of a flight recorder (*{SUFFIX}) of this version of Quire.")
    recordings = [open_files(path for _, path in sorted(files)) for files in found.values()]
    return sorted(recordings, key=lambda each: each.preamble.unix_time)


def open_files(files: Iterable[Path]) -> Recording:
    """The recording in the files of one engine, in order. Raises ConfigError."""
    paths = list(files)
    preamble = read_preamble(_read(paths[0]))
    if preamble is None:
        raise ConfigError(f"{paths[0]} is no file of a flight recorder, or one of another version of Quire.")
    return Recording(preamble, paths)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.") from None


_DECODERS: dict[Kind, Callable[[Any], Event]] = {
    Kind.INPUT: msgspec.msgpack.Decoder(RecordedInput).decode,
    Kind.PLAN: msgspec.msgpack.Decoder(Planned).decode,
    Kind.RESULT: msgspec.msgpack.Decoder(Answered).decode,
    Kind.ENDED: msgspec.msgpack.Decoder(Ended).decode,
    Kind.FAULT: lambda payload: bytes(payload).decode("utf-8", "replace"),
    Kind.VOCABULARY: msgspec.msgpack.Decoder(NamedVocabulary).decode,
    Kind.CUT: msgspec.msgpack.Decoder(Cut).decode,
}


def _content(record: Record, path: Path) -> Event:
    try:
        return _DECODERS[record.kind](record.payload)
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: {error}.") from None
