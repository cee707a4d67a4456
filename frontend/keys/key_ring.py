"""The keys that a server accepts, and the holder of each. A key file is read again when it changes."""

import asyncio
import hmac
import os
from collections.abc import Sequence

from quire.core.errors import ConfigError
from quire.core.logging import get_logger
from quire.frontend.keys.caller import Caller, Limits
from quire.frontend.keys.key_file import KeyEntry, digest_of, read_key_file
from quire.frontend.keys.usage import KeyUsage

logger = get_logger(__name__)

POLL_SECONDS = 1.0


class KeyRing:
    """Finds the holder of a key.

    Args:
        keys: those of `--api-key`. A single one has no name: there is nobody to be kept apart from. Several are called
            key-1, key-2 and so on.
        path: of `--api-key-file`, or None.
        limits: counts what keys used in the last minute.

    Raises:
        ConfigError: the file is wrong.
    """

    def __init__(self, keys: Sequence[str], path: str | None, limits: Limits) -> None:
        self.usage = KeyUsage()
        self._given = [KeyEntry(name=f"key-{number}", key=key) for number, key in enumerate(dict.fromkeys(keys), 1)]
        self._path = path
        self._limits = limits
        self._seen = self._read_state()
        self._callers: list[tuple[bytes, Caller | None]] = []
        self._set([] if path is None else read_key_file(path))

    @property
    def num_keys(self) -> int:
        """The number of keys."""
        return len(self._callers)

    def find(self, presented: Sequence[bytes]) -> tuple[bool, Caller | None]:
        """Whether one of the `presented` texts is a key, and its holder, if it has a name.

        Digests are compared, each in the same time wherever it differs, and always all of them.
        """
        is_found, found = False, None
        digests = [digest_of(text) for text in presented]
        for digest, caller in self._callers:
            for each in digests:
                if hmac.compare_digest(each, digest):
                    is_found, found = True, caller
        return is_found, found

    async def run(self) -> None:
        """Watches the file until cancelled. It is polled, as tools often replace a folder's symbolic link instead."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            self.check()

    def check(self) -> None:
        """Reads the file again if it has changed since the last call; logs an error if it cannot be used."""
        state = self._read_state()
        if state is not None and state != self._seen:
            self._seen = state
            self.reload()

    def reload(self) -> None:
        """Reads the file again. A file that cannot be used leaves the former keys in force."""
        if self._path is None:
            return
        try:
            self._set(read_key_file(self._path))
        except ConfigError as error:
            logger.error("the former API keys stay in force: %s", error)
        else:
            logger.info("API keys were read again: %d", self.num_keys)

    def _set(self, entries: Sequence[KeyEntry]) -> None:
        taken = {each.name for each in self._given} & {each.name for each in entries}
        if taken:
            raise ConfigError(f"--api-key-file: {min(taken)} is the name of a key of --api-key; choose another.")
        every = [*self._given, *entries]
        is_alone = len(every) == 1
        callers: list[tuple[bytes, Caller | None]] = []
        for entry in every:
            caller = None
            if entry not in self._given or not is_alone:
                self.usage.show(entry.name)
                caller = Caller(
                    entry.name,
                    weight=entry.weight,
                    requests_per_minute=entry.requests_per_minute,
                    tokens_per_minute=entry.tokens_per_minute,
                    limits=self._limits,
                    count=self.usage.add,
                    is_alone=is_alone,
                )
            callers.append((entry.digest, caller))
        self._callers = callers

    def _read_state(self) -> tuple[int, int, int] | None:
        """Inode, size and modification time of the file; None while it is missing, as between two renames."""
        if self._path is None:
            return None
        try:
            stat = os.stat(self._path)
        except OSError:
            return None
        return stat.st_ino, stat.st_size, stat.st_mtime_ns
