"""Keeps processed items in files of memory, so that several processes share them."""

import asyncio
import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from quire.core.config.multimodal import MultimodalConfig
from quire.core.logging import get_logger
from quire.frontend.media.item_cache import ItemCache, OwnItems, size_of
from quire.frontend.media.messages import ReadyItem

logger = get_logger(__name__)

_PREFIX, _OWNER, _LOCK = "quire-media-", "owner", "lock"
_MEMORY = "/dev/shm"
_SETTLING_SECONDS = 60.0
"""An unowned folder, or an unfinished file, that is older was left by a process that was killed."""
_GIB, _MIB = 2**30, 2**20
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ReadyItem).decode


def cache_of(config: MultimodalConfig, folder: str = "") -> ItemCache:
    """The cache that the options ask for.

    Args:
        folder: another process's `ItemFolder`; empty: there is none.
    """
    max_bytes = int(config.mm_processor_cache_gb * _GIB)
    if not config.shares_items:
        return OwnItems(max_bytes)
    owned = None if folder else ItemFolder()
    path = Path(folder) if owned is None else owned.path
    return SharedItems(path, max_bytes, config.mm_shm_cache_max_object_size_mb * _MIB, owned=owned)


class ItemFolder:
    """A private folder in memory, which goes with the process that made it. One that a killed process left is removed
    when the next one is made.

    Attributes:
        path: of the folder.
    """

    def __init__(self) -> None:
        base = Path(_MEMORY if os.access(_MEMORY, os.W_OK) else tempfile.gettempdir())
        _remove_left(base)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        self._owner = open(self.path / _OWNER, "wb")  # noqa: SIM115
        fcntl.flock(self._owner, fcntl.LOCK_EX)

    def close(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._owner.close()


class SharedItems:
    """The items of all processes that know the folder; an `ItemCache`. Items unused for longest are forgotten first.

    Args:
        folder: holds a file for each item.
        max_bytes: of all files.
        max_object_bytes: of one item's arrays; larger ones are not kept.
        owned: removed when the cache closes; None: another process removes the folder.
    """

    def __init__(self, folder: Path, max_bytes: int, max_object_bytes: int, *, owned: ItemFolder | None = None) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._max_object_bytes = max_object_bytes
        self._owned = owned
        self._has_failed = False

    async def get(self, name: bytes) -> ReadyItem | None:
        return await asyncio.to_thread(self._read, self._folder / name.hex())

    async def put(self, name: bytes, made: ReadyItem) -> None:
        if size_of(made) <= min(self._max_object_bytes, self._max_bytes):
            await asyncio.to_thread(self._write, self._folder / name.hex(), made)

    def clear(self) -> None:
        with contextlib.suppress(OSError):
            for entry in self._files():
                os.unlink(entry)

    def close(self) -> None:
        if self._owned is not None:
            self._owned.close()

    def _read(self, path: Path) -> ReadyItem | None:
        try:
            made = _decode(path.read_bytes())
            os.utime(path)
        except (OSError, msgspec.MsgspecError):
            return None
        return made

    def _write(self, path: Path, made: ReadyItem) -> None:
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            unfinished.write_bytes(_encode(made))
            unfinished.replace(path)
            with contextlib.suppress(BlockingIOError), open(self._folder / _LOCK, "wb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while another process is at it
                self._shrink()
        except OSError as error:  # the memory is full, or somebody removed the folder
            with contextlib.suppress(OSError):
                unfinished.unlink()
            if not self._has_failed:
                logger.warning("processed items are not kept in %s: %s", self._folder, error)
            self._has_failed = True

    def _shrink(self) -> None:
        """Removes the files that were not used for longest, until the others fit."""
        found, now = [], time.time()
        for entry in self._files():
            with contextlib.suppress(FileNotFoundError):
                stat = entry.stat()
                if entry.name[0] != ".":
                    found.append((stat.st_mtime_ns, stat.st_size, entry))
                elif now - stat.st_mtime > _SETTLING_SECONDS:
                    entry.unlink()
        num_bytes = sum(size for _, size, _ in found)
        for _, size, entry in sorted(found):
            if num_bytes <= self._max_bytes:
                return
            entry.unlink(missing_ok=True)
            num_bytes -= size

    def _files(self) -> Iterator[Path]:
        return (each for each in self._folder.iterdir() if each.name not in (_OWNER, _LOCK))


def _remove_left(base: Path) -> None:
    for folder in base.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # of another user, or gone meanwhile
            if time.time() - folder.stat().st_mtime < _SETTLING_SECONDS:
                continue
            with open(folder / _OWNER, "rb+") as owner:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while its process lives
                shutil.rmtree(folder, ignore_errors=True)
