"""Keys are found by what clients present, and read again when their file changes."""

import json
import os
from pathlib import Path

import pytest

from quire.core.errors import ConfigError
from quire.frontend.keys.key_ring import KeyRing
from quire.frontend.keys.rate_limits import RateLimits


def write(path: Path, **keys: str) -> str:
    before = path.stat().st_mtime_ns if path.exists() else 0
    path.write_text(json.dumps([{"name": name, "key": key} for name, key in keys.items()]))
    os.utime(path, ns=(before + 10**9, before + 10**9))
    return str(path)


def holder(ring: KeyRing, *presented: bytes) -> str | None:
    """The name of a key's holder; "" for a key without a name, None for no key."""
    is_found, caller = ring.find(presented)
    return None if not is_found else "" if caller is None else caller.name


def test_one_key_has_no_name_and_several_have_their_numbers() -> None:
    alone, several = KeyRing(["one"], None, RateLimits()), KeyRing(["one", "two", "one"], None, RateLimits())
    assert [holder(alone, each) for each in (b"one", b"on", b"one ", b"")] == ["", None, None, None]
    assert [holder(several, each) for each in (b"one", b"two", b"three")] == ["key-1", "key-2", None]
    assert (alone.num_keys, several.num_keys) == (1, 2)


def test_either_of_two_presented_texts_may_be_the_key(tmp_path: Path) -> None:
    ring = KeyRing(["zero"], write(tmp_path / "keys", ann="one", bob="two"), RateLimits())
    assert holder(ring, b"", b"two") == holder(ring, b"two", b"nonsense") == "bob"
    assert holder(ring, b"zero") == "key-1"


def test_a_changed_file_is_read_and_a_broken_one_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys"
    ring = KeyRing([], write(path, ann="one", bob="two"), RateLimits())
    write(path, bob="two", eve="three")
    assert holder(ring, b"one") == "ann", "nobody has looked"
    ring.check()
    assert [holder(ring, each) for each in (b"one", b"two", b"three")] == [None, "bob", "eve"]
    write(path)
    ring.check()
    path.unlink()
    ring.check()
    ring.reload()
    assert holder(ring, b"three") == "eve"
    assert "three" not in caplog.text


def test_names_of_the_command_line_are_not_for_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="key-1"):
        KeyRing(["one"], write(tmp_path / "keys", **{"key-1": "two"}), RateLimits())


def test_salts_keep_keys_apart_however_clients_choose_theirs(tmp_path: Path) -> None:
    ring = KeyRing([], write(tmp_path / "keys", a="one", b="two"), RateLimits())
    (_, a), (_, b) = ring.find([b"one"]), ring.find([b"two"])
    assert a is not None
    assert b is not None
    salts = [None, "x", "a:", "b:", "b:x", ":"]
    assert len({each.salted(salt) for each in (a, b) for salt in salts}) == 2 * len(salts)


def test_a_single_key_of_a_file_has_a_name_and_no_salt(tmp_path: Path) -> None:
    ring = KeyRing([], write(tmp_path / "keys", a="one"), RateLimits())
    _, caller = ring.find([b"one"])
    assert caller is not None
    assert (caller.name, caller.salted(None), caller.salted("x")) == ("a", None, "x")
