"""The grid of a sweep: named sets of flags, and command lines with these flags."""

import itertools
import re
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from quire.core.errors import ConfigError

NAME_KEY = "_benchmark_name"  # vLLM's


class Setting(Struct, frozen=True):
    """One point on one side of the grid: flags by name, without leading dashes."""

    name: str
    flags: dict[str, Any] = {}

    def apply(self, command: list[str]) -> list[str]:
        """`command` with these flags, which replace its own flags of the same names."""
        for key, value in self.flags.items():
            command = _without(command, flag_of(key), value) + _words(flag_of(key), value)
        return command


def read_settings(flag: str, text: str | None) -> list[Setting]:
    """Reads the settings of `--serve-params` and similar flags, from a JSON file or from JSON in `text`.

    In a list of objects, each object is a setting. An object of objects has settings by name. An object of lists means
    all combinations of their items. Without a text, there is one setting without flags.

    Raises:
        ConfigError: the text is none of these.
    """
    if text is None:
        return [Setting("")]
    try:
        content = text if text.lstrip()[:1] in ("[", "{") else Path(text).read_text(encoding="utf-8")
        data = msgspec.json.decode(content)
    except OSError as error:
        raise ConfigError(f"{flag} {text}: {error.strerror}.") from None
    except msgspec.DecodeError as error:
        needed = """JSON such as '[{"max_num_seqs": 8}]', or a file of it"""
        raise ConfigError(f"{flag}: {str(error).rstrip('.')}. Give {needed}.") from None
    settings = [_setting(record) for record in _records(flag, data)]
    names = [setting.name for setting in settings]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"{flag} has {twice!r} twice.")
    return settings


def flag_of(key: str) -> str:
    """`max_num_seqs` as `--max-num-seqs`; the part after a dot is unchanged."""
    head, dot, rest = key.partition(".")
    return "--" + head.replace("_", "-") + dot + rest


def file_name(text: str) -> str:
    """`text` as the name of a file or folder."""
    return re.sub(r"[^\w.=,-]+", "_", text)


def _records(flag: str, data: Any) -> list[dict[str, Any]]:
    if isinstance(data, dict):
        if data and all(isinstance(value, dict) for value in data.values()):
            data = [{NAME_KEY: name} | flags for name, flags in data.items()]
        elif data and all(isinstance(value, list) for value in data.values()):
            data = [dict(zip(data, row, strict=True)) for row in itertools.product(*data.values())]
    if not isinstance(data, list) or not data or not all(isinstance(record, dict) for record in data):
        raise ConfigError(
            f'{flag} takes a list of settings, such as [{{"max_concurrency": 1}}, {{"max_concurrency": 8}}], '
            'or lists to combine, such as {"max_concurrency": [1, 8]}.'
        )
    return data


def _setting(record: dict[str, Any]) -> Setting:
    flags = {key: value for key, value in record.items() if key != NAME_KEY}
    spelled = ",".join(f"{key}={value}" for key, value in flags.items())
    return Setting(str(record.get(NAME_KEY, spelled)), flags)


def _words(flag: str, value: Any) -> list[str]:
    match value:
        case True:
            return [flag]
        case False:
            return [f"--no-{flag[2:]}"]
        case None:
            return []
        case list():
            return [flag, *map(str, value)]
        case dict():
            return [flag, msgspec.json.encode(value).decode()]
    return [flag, str(value)]


def _without(command: list[str], flag: str, value: Any) -> list[str]:
    """`command` without `flag`, in any spelling, and without the words of its value, which has `value`'s type."""
    spellings = {flag, f"--no-{flag[2:]}"}
    width: float = 0 if isinstance(value, bool) else float("inf") if isinstance(value, list) else 1
    kept: list[str] = []
    dropping: float = 0
    for word in command:
        name, equals, _ = word.partition("=")
        if word.startswith("--"):
            found = flag_of(name[2:]) in spellings
            dropping = width if found and not equals else 0
            if not found:
                kept.append(word)
        elif dropping:
            dropping -= 1
        else:
            kept.append(word)
    return kept
