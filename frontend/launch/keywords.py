"""Engine options as Python keywords, for programs that start an engine."""

import os
from typing import Any

from quire.core.config.engine_args import EngineArgs, keyword_aliases
from quire.core.errors import ConfigError
from quire.frontend.refusals.flags import FlagRefusals


def read_keywords(options: dict[str, Any]) -> EngineArgs:
    """Reads engine options from keywords: `model="...", max_num_seqs=64`. Drops keywords that ask for nothing.

    Raises:
        ConfigError: a value is wrong, or there is no such option; the error suggests similar ones, as for a flag.
    """
    options = _without_aliases(options)
    known = EngineArgs().flat()
    refusals = FlagRefusals(map(_flag, known), ["engine"])
    for name in options.keys() - known.keys():
        try:
            refusals.drop(_flag(name), options[name])
        except ConfigError as error:
            raise ConfigError(f"Option {name!r}: {error}") from None
    options = {
        name: value
        for name, value in options.items()
        if name in known and (value is not None or known[name] is None)  # None is the default of every option
    }
    if isinstance(options.get("model"), os.PathLike):
        options["model"] = os.fspath(options["model"])
    return EngineArgs.from_flat(**options)


def _without_aliases(options: dict[str, Any]) -> dict[str, Any]:
    """The options under their own names. Raises ConfigError if one has a value under two names."""
    names = keyword_aliases()
    found: dict[str, Any] = {}
    for given, value in options.items():
        name = names.get(given, given)
        if value is not None and found.get(name) is not None:
            others = [other for other in (name, *names) if other in options and names.get(other, other) == name]
            raise ConfigError(f"{' and '.join(map(repr, others))} are one option; give one of them.")
        if value is not None or name not in found:
            found[name] = value
    return found


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
