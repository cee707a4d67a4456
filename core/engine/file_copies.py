"""Copies of files that frontends on other hosts name in their requests."""

import hashlib
import os

from quire.core.wire.protocol import LentFile


class FileCopies:
    """The copies of one engine: memory files, which its workers open by a path in /proc.

    A file's copy lives as long as this process, because workers may open it at any time. Equal files share one: the
    processes of one server lend the same vocabulary.
    """

    def __init__(self) -> None:
        self._by_digest: dict[bytes, str] = {}  # paths here
        self._by_name: dict[tuple[bytes, str], str] = {}  # paths here, by the frontend and its path there

    def add(self, frontend: bytes, file: LentFile) -> None:
        """Keeps a file of a frontend."""
        digest = hashlib.sha256(file.data).digest()
        if digest not in self._by_digest:
            fd = os.memfd_create("quire-lent")
            with open(fd, "wb", closefd=False) as copy:
                copy.write(file.data)
            self._by_digest[digest] = f"/proc/{os.getpid()}/fd/{fd}"
        self._by_name[frontend, file.path] = self._by_digest[digest]

    def path_here(self, frontend: bytes, path: str) -> str:
        """Where workers find the file that a frontend calls `path`: there, unless it has lent the file."""
        return self._by_name.get((frontend, path), path)

    def forget(self, frontend: bytes) -> None:
        """A frontend is gone, and its paths with it."""
        for name in [name for name in self._by_name if name[0] == frontend]:
            del self._by_name[name]
