"""`--config FILE.yaml`: a flat mapping from long flag names (dashes or underscores) to values.

Scalars are read as text, so that they follow the rules of the command line. Only true, false and null, and all values
within an object, keep YAML's meaning.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.core.errors import ConfigError
from quire.frontend.flags.dotted import DottedValue
from quire.frontend.flags.values import Field
from quire.frontend.refusals.flags import FlagRefusals


@dataclass(frozen=True)
class FileSettings:
    """The settings of a file: values by the parser's dest, and dotted keys in order."""

    values: dict[str, Any]
    dotted: list[DottedValue]


def read(
    path: str, flags: Mapping[str, argparse.Action], fields: Mapping[str, Field], refusals: FlagRefusals
) -> FileSettings:
    """The settings in the file at `path`.

    Raises:
        ConfigError: an unreadable file, an unknown key or a wrong value, by file and key.
    """
    typed, texts = _load(path)
    values: dict[str, Any] = {}
    dotted: list[DottedValue] = []
    for key, value in typed.items():
        flag = "--" + ("model" if key in ("model_tag", "model-tag") else key)
        base, *keys = flag.split(".")
        base = base.replace("_", "-")
        append = flag.endswith("+")
        if (keys or append) and base.removesuffix("+") in fields and fields[base.removesuffix("+")].is_json:
            text = texts[key] if isinstance(texts[key], str) else json.dumps(value)
            flag_keys = [part.removesuffix("+") if append else part for part in keys]
            dotted.append(DottedValue(base.removesuffix("+"), flag_keys, append, text))
            continue
        flag = ".".join([base, *keys])
        if flag == "--config":
            raise ConfigError(f"{path}: config cannot be nested")
        try:
            if flag not in flags:
                refusals.drop(flag, value)
            elif value is not None or _takes_null(flags[flag]):
                values[flags[flag].dest] = _value(flags[flag], value, texts[key])
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        except (argparse.ArgumentTypeError, ValueError, TypeError) as error:
            raise ConfigError(f"{path}: {key}: {error}") from None
    return FileSettings(values, dotted)


def _load(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The file's mapping twice: with YAML's types, and with every scalar as text."""
    import yaml  # imported here, because most command lines name no file, and every --help would wait for it

    try:
        text = Path(path).read_text(encoding="utf-8")
        _refuse_duplicates(path, yaml.compose(text, Loader=yaml.SafeLoader))
        typed, texts = yaml.safe_load(text), yaml.load(text, Loader=yaml.BaseLoader)
    except OSError as error:
        raise ConfigError(f"--config: cannot read {path!r}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config: cannot read {path!r}: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--config: {path} is not YAML: {error}") from None
    if typed is None:
        return {}, {}
    if not isinstance(typed, dict) or not all(isinstance(key, str) for key in typed):
        raise ConfigError(f"--config: {path} must map option names to values, as in `max-num-seqs: 64`")
    return typed, texts


def _refuse_duplicates(path: str, root: Any) -> None:
    """Raises ConfigError for a key that a mapping has twice; YAML's loader would take the last one.

    Options may be written with dashes and underscores, the keys of their values in one way only.
    """
    unread, visited = [root], set[int]()
    while unread:
        node = unread.pop()
        if node is None or node.id == "scalar" or id(node) in visited:  # an alias may lead back to a node
            continue
        visited.add(id(node))
        if node.id == "sequence":
            unread += node.value
            continue
        seen: set[Any] = set()
        for key, value in node.value:
            text = str(key.value)
            name = text.replace("_", "-") if node is root else (key.tag, text)
            if name in seen:
                raise ConfigError(
                    f"--config: {path} has {key.value!r} twice (line {key.start_mark.line + 1}); give it once."
                )
            seen.add(name)
            unread.append(value)


def _value(action: argparse.Action, value: Any, text: Any) -> Any:
    if action.nargs == 0:
        value = {"true": True, "false": False}.get(str(value).lower())
        if value is None:
            raise ValueError(f"must be true or false (got {text!r})")
        return action.const if value else not action.const
    if isinstance(action.type, Field) and action.type.is_json and value is not None:
        return action.type(text if isinstance(value, str) else json.dumps(value))
    if value is None:
        return _convert(action, "None")
    if isinstance(value, bool) and action.nargs == "?":
        return value
    if action.nargs in ("+", "*"):
        return [_convert(action, item) for item in (text if isinstance(text, list) else [text])]
    return _convert(action, text)


def _takes_null(action: argparse.Action) -> bool:
    """Returns True if null is a value of the option; elsewhere null leaves the option at its default."""
    return isinstance(action.type, Field) and action.type.nullable


def _convert(action: argparse.Action, text: Any) -> Any:
    if not isinstance(text, str):
        raise ValueError(f"needs a single value (got {text!r})")
    value = action.type(text) if callable(action.type) else text
    if action.choices is not None and value not in action.choices:
        raise ValueError(f"choose from {', '.join(map(str, action.choices))} (got {text!r})")
    return value
