"""The places where a flight recorder writes: two memory files that its parent keeps, or a bounded ring of files.

Both outlive the process, however it ends.
"""

import contextlib
import os
import time
from pathlib import Path
from typing import Protocol

from quire.core.flight.records import SUFFIX

MEMORY_BYTES = 4 << 20
"""Of each of the two memory files."""
FILE_BYTES = 8 << 20
MAX_FILES = 8
"""The files of a folder, of one engine after another."""


class Segments(Protocol):
    """Hands out one empty file after another.

    Attributes:
        num_bytes: a file's size at which the next one begins.
    """

    num_bytes: int

    def next_file(self) -> int:
        """The descriptor of an empty file, open for writing; the one before is full. Raises OSError."""


class MemorySegments:
    """Two memory files in turn. Whoever has their descriptors reads them after the end of this process."""

    num_bytes = MEMORY_BYTES

    def __init__(self, descriptors: tuple[int, int]) -> None:
        self._descriptors = descriptors
        self._count = 0

    def next_file(self) -> int:
        descriptor = self._descriptors[self._count % 2]
        self._count += 1
        os.ftruncate(descriptor, 0)
        os.lseek(descriptor, 0, os.SEEK_SET)
        return descriptor


class FileSegments:
    """Files in a folder, of which the oldest are removed.

    Args:
        name: of the engine; its files begin with it.
    """

    num_bytes = FILE_BYTES

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self._stem = f"{name}-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}"
        self._count = 0
        self._descriptor: int | None = None

    def next_file(self) -> int:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        remove_oldest(self._folder, f"{self._name}-*{SUFFIX}", MAX_FILES - 1)
        path = self._folder / f"{self._stem}-{self._count:06d}{SUFFIX}"
        self._count += 1
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        return self._descriptor


def remove_oldest(folder: Path, pattern: str, most: int) -> None:
    """Removes the oldest files of a pattern until `most` are left. Others may do the same at that time."""
    found = []
    for path in folder.glob(pattern):
        with contextlib.suppress(FileNotFoundError):
            found.append((path.stat().st_mtime_ns, path))
    for _, path in sorted(found)[: max(0, len(found) - most)]:
        path.unlink(missing_ok=True)
