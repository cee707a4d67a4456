"""Memory for the flight recorder of a child, and what becomes of it when the child has crashed."""

import contextlib
import os
import time
import weakref
from pathlib import Path
from typing import Protocol

from quire.core import envs
from quire.core.flight.records import HEAD, SUFFIX, Kind, read_preamble, read_records
from quire.core.flight.segments import remove_oldest
from quire.core.logging import get_logger

logger = get_logger(__name__)

MAX_DUMPS = 8
"""Files of crashes that are kept, of all servers of a user."""


def dump_folder() -> Path:
    """Where crashes are written."""
    return envs.cache_folder() / "flight"


class Flight(Protocol):
    """What is kept of a child for the time after its end."""

    @property
    def descriptors(self) -> tuple[int, int] | None:
        """Those that the child inherits, if any."""

    def save(self, reason: str) -> Path | None:
        """Keeps the records of a child that ended for `reason`. Returns where they are; None if there are none."""


class FlightFolder:
    """A folder that a child records in by itself."""

    descriptors = None

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(self, reason: str) -> Path | None:
        return self._folder if any(self._folder.glob(f"*{SUFFIX}")) else None


class FlightMemory:
    """Two memory files, in which a child records that inherits their descriptors. They are read after its end.

    Args:
        name: of the child, which the names of files begin with.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.descriptors = os.memfd_create("quire-flight-0"), os.memfd_create("quire-flight-1")
        weakref.finalize(self, _close, self.descriptors).atexit = False

    def save(self, reason: str) -> Path | None:
        parts = [data for data in map(_content, self.descriptors) if read_preamble(data) is not None]
        parts.sort(key=_sequence)
        if not any(record.kind is Kind.PLAN for data in parts for record in read_records(data)):
            return None
        text = reason.encode("utf-8", "replace")
        unique = f"{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}-{time.monotonic_ns() % 10**9:09d}"
        path = dump_folder() / f"{self._name}-{unique}{SUFFIX}"
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            remove_oldest(path.parent, f"*{SUFFIX}", MAX_DUMPS - 1)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
                file.writelines(parts)
                file.write(HEAD.pack(len(text), Kind.FAULT, time.monotonic()) + text)
        except OSError as error:
            with contextlib.suppress(OSError):
                path.unlink()  # half of it would only take room
            logger.warning("what the engine did last cannot be written to %s: %s", path, error.strerror)
            return None
        return path


def _close(descriptors: tuple[int, int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _content(descriptor: int) -> bytes:
    """The whole records of a memory file. The descriptor's offset is the child's."""
    data = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    end = sum(HEAD.size + len(record.payload) for record in read_records(data))
    return data[:end]


def _sequence(data: bytes) -> int:
    preamble = read_preamble(data)
    assert preamble is not None
    return preamble.sequence
