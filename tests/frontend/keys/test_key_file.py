"""A key file is TOML, a JSON list or JSON lines; a wrong one is refused by entry, without showing a key."""

import hashlib
from pathlib import Path

import pytest

from quire.core.errors import ConfigError
from quire.frontend.keys.key_file import KeyEntry, read_key_file

TOML = """
[[keys]]
name = "team-a"
key = "secret-a"
weight = 2.5
requests_per_minute = 60

[[keys]]
name = "team-b"
hash = "sha256:{hash}"
tokens_per_minute = 100000
""".format(hash=hashlib.sha256(b"secret-b").hexdigest())
LIST = """[
  {{"name": "team-a", "key": "secret-a", "weight": 2.5, "requests_per_minute": 60}},
  {{"name": "team-b", "hash": "sha256:{hash}", "tokens_per_minute": 100000}}
]""".format(hash=hashlib.sha256(b"secret-b").hexdigest())
LINES = LIST.strip("[]").replace("},", "}").strip()


def read(folder: Path, text: str, name: str = "keys.json") -> list[KeyEntry]:
    (folder / name).write_text(text)
    return read_key_file(str(folder / name))


@pytest.mark.parametrize(("text", "name"), [(TOML, "keys.toml"), (LIST, "keys.json"), (LINES, "keys.jsonl")])
def test_each_form_holds_the_same_keys(text: str, name: str, tmp_path: Path) -> None:
    first, second = read(tmp_path, text, name)
    assert (first.name, first.weight, first.requests_per_minute, first.tokens_per_minute) == ("team-a", 2.5, 60, None)
    assert (second.name, second.weight, second.requests_per_minute, second.tokens_per_minute) == (
        *("team-b", 1.0, None, 100000),
    )
    assert [first.digest, second.digest] == [hashlib.sha256(each).digest() for each in (b"secret-a", b"secret-b")]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[{"name": "a", "key": "hunter2", "wieght": 2}]', "entry 1: Object contains unknown field `wieght`"),
        ('[{"key": "hunter2"}]', "entry 1: Object missing required field `name`"),
        ('[{"name": "a", "key": "hunter2", "weight": 0}]', "entry 1: Expected `float` > 0"),
        ('[{"name": "a", "key": "hunter2", "requests_per_minute": 0}]', "entry 1: Expected `int` >= 1"),
        ('[{"name": "a b", "key": "hunter2"}]', "entry 1: .*matching regex"),
        ('[{"name": "a"}]', r"entry 1 \(a\) needs either a key or a hash"),
        ('[{"name": "a", "key": "hunter2", "hash": "sha256:' + "0" * 64 + '"}]', "either a key or a hash"),
        ('[{"name": "a", "hash": "hunter2"}]', "entry 1: .*matching regex"),
        ('[{"name": "a", "key": " "}]', "empty key"),
        ('[{"name": "a", "key": "hunter2"}, {"name": "a", "key": "hunter3"}]', "entries 1 and 2 have the same name"),
        ('[{"name": "a", "key": "hunter2"}, {"name": "b", "key": "hunter2"}]', "entries 1 and 2 have the same key"),
        ("[]", "has no keys"),
        ("hunter2", "neither TOML nor JSON"),
        ('[{"name": "a", "key": "hunter2"}', "neither TOML nor JSON"),
    ],
)
def test_a_wrong_file_is_refused_without_its_keys(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        read(tmp_path, text)
    assert "hunter" not in str(caught.value)


@pytest.mark.parametrize("text", ['key = "hunter2"', "[[keys]\nkey = 'hunter2'", '[keys]\nname = "a"'])
def test_wrong_toml_is_refused_without_its_keys(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="TOML") as caught:
        read(tmp_path, text, "keys.toml")
    assert "hunter" not in str(caught.value)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match="--api-key-file: cannot read '/no/keys': No such file"):
        read_key_file("/no/keys")
