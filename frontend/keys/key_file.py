"""The file of `--api-key-file`: who may call a server, with which share and limits."""

import hashlib
import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from quire.core.errors import ConfigError

HASH_PREFIX = "sha256:"

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
PerMinute = Annotated[int, Meta(ge=1)]


class KeyEntry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key.

    Attributes:
        name: of its holder; shown in metrics and errors.
        key: as clients send it; or else `hash`, "sha256:" and its SHA-256 in hexadecimal digits.
        weight: its share of the engine beside others.
    """

    name: Name
    key: str | None = None
    hash: Annotated[str, Meta(pattern="^sha256:[0-9a-fA-F]{64}$")] | None = None
    weight: Annotated[float, Meta(gt=0, le=1000)] = 1.0
    requests_per_minute: PerMinute | None = None
    tokens_per_minute: PerMinute | None = None

    @property
    def digest(self) -> bytes:
        """The SHA-256 of the key."""
        if self.key is not None:
            return digest_of(self.key.encode())
        assert self.hash is not None
        return bytes.fromhex(self.hash.removeprefix(HASH_PREFIX))


def digest_of(key: bytes) -> bytes:
    """What keys are compared by."""
    return hashlib.sha256(key).digest()


def read_key_file(path: str) -> list[KeyEntry]:
    """The keys of a file: TOML with a table `[[keys]]` for each (`.toml`), a JSON list, or JSON with one a line.

    Raises:
        ConfigError: the file cannot be read, or a key in it is wrong; the message quotes no key.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"--api-key-file: cannot read {path!r}: {reason}.") from None
    try:
        entries = [_entry(number, each) for number, each in enumerate(_tables(path, text), 1)]
    except (tomllib.TOMLDecodeError, msgspec.DecodeError) as error:
        where = re.search(r"\(at line \d+.*?\)|\(byte \d+\)", str(error))  # the rest may quote a key
        raise ConfigError(
            f"--api-key-file {path!r}: it is neither TOML nor JSON {where[0] if where else ''}".rstrip() + "."
        ) from None
    if not entries:
        raise ConfigError(f"--api-key-file {path!r} has no keys, so nobody could call; add one, or leave it out.")
    for what, values in (("name", [each.name for each in entries]), ("key", [each.digest for each in entries])):
        value, count = Counter(values).most_common(1)[0]
        if count > 1:
            first, second = [number for number, each in enumerate(values, 1) if each == value][:2]
            raise ConfigError(f"--api-key-file {path!r}: entries {first} and {second} have the same {what}.")
    return entries


def _tables(path: str, text: str) -> list[Any]:
    if path.endswith(".toml"):
        found = tomllib.loads(text)
        if list(found) not in ([], ["keys"]) or not isinstance(found.get("keys", []), list):
            raise ConfigError(f"--api-key-file {path!r}: TOML has one table [[keys]] for each key, and nothing else.")
        keys: list[Any] = found.get("keys", [])
        return keys
    if text.lstrip().startswith("["):
        return msgspec.json.decode(text, type=list[Any])
    return [msgspec.json.decode(line) for line in text.splitlines() if line.strip()]


def _entry(number: int, table: Any) -> KeyEntry:
    try:
        entry = msgspec.convert(table, KeyEntry)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--api-key-file: entry {number}: {error}.") from None
    if (entry.key is None) == (entry.hash is None):
        raise ConfigError(f"--api-key-file: entry {number} ({entry.name}) needs either a key or a hash.")
    if entry.key is not None and not entry.key.strip():
        raise ConfigError(f"--api-key-file: entry {number} ({entry.name}) has an empty key, which lets anyone in.")
    return entry
