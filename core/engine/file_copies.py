"""Copies of files that frontends on other hosts name in their requests."""

import hashlib
import os

from quire.core.wire.protocol import LentFile


class FileCopies:
    """One engine's copies of frontends' files: memory files that its workers open by a path in /proc.

    A copy lives as long as this process, because workers may open it at any time. Equal files share one copy: all
    processes of a server send the same vocabulary.
    """

    def __init__(self) -> None:
        self._by_digest: dict[bytes, str] = {}  # paths here
        self._by_name: dict[tuple[bytes, str], str] = {}  # paths here, by the frontend and its path there

    def add(self, frontend: bytes, file: LentFile) -> None:
        """Stores a frontend's file."""
        digest = hashlib.sha256(file.data).digest()
        if digest not in self._by_digest:
            fd = os.memfd_create("quire-lent")
            with open(fd, "wb", closefd=False) as copy:
                copy.write(file.data)
            self._by_digest[digest] = f"/proc/{os.getpid()}/fd/{fd}"
        self._by_name[frontend, file.path] = self._by_digest[digest]

    def path_here(self, frontend: bytes, path: str) -> str:
        """The path at which workers find the frontend's file `path`: that of the copy, or `path` itself without one."""
        return self._by_name.get((frontend, path), path)

    def forget(self, frontend: bytes) -> None:
        """Forgets the paths of a frontend that is gone."""
        for name in [name for name in self._by_name if name[0] == frontend]:
            del self._by_name[name]
