"""Explains why a command does not take a flag: a known one that Quire does not support, or an unknown one."""

import functools
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from quire.core.errors import ConfigError
from quire.frontend.refusals.unsupported_flags import UnsupportedFlag, unsupported


class FlagRefusals:
    """Refuses the flags that a command does not take, unless they ask for nothing.

    Args:
        known: every flag that the command takes.
        sections: of unsupported_flags.json, that hold the flags which the command refuses by name.
        others: more flags that the command refuses by name.
    """

    def __init__(
        self, known: Iterable[str], sections: Iterable[str], others: dict[str, UnsupportedFlag] | None = None
    ) -> None:
        self.known = set(known)
        self.sections = list(sections)
        self.others = others or {}

    @functools.cached_property
    def unsupported(self) -> dict[str, UnsupportedFlag]:
        """Flags that the command refuses by name, by each of their spellings."""
        merged = {flag: known for section in self.sections for flag, known in unsupported(section).items()}
        return {flag: known for flag, known in (merged | self.others).items() if flag not in self.known}

    def find(self, flag: str) -> UnsupportedFlag | None:
        """The table's entry of a flag (dashes, no value) that the command does not take."""
        name = self._name(flag)
        return None if name is None else self.unsupported[name]

    def drop(self, flag: str, value: Any = True) -> None:
        """Returns if `flag` asks for nothing with this value: the caller may go on without it.

        Args:
            value: text, or of a type that YAML and Python have; for a switch, whether it is given.

        Raises:
            ConfigError: the flag asks for something, or nobody knows it.
        """
        name = self._name(flag)
        if name is None:
            raise ConfigError(self.explain(flag))
        if isinstance(value, bool) and flag.startswith("--no-") and not name.startswith("--no-"):
            value = not value
        known = self.unsupported[name]
        if not known.asks_for_nothing(value):
            has_other_values = isinstance(known.harmless, list) and known.harmless  # else the value may be a secret
            raise ConfigError(self.explain(f"{flag} {value}" if has_other_values else flag, named=name))

    def describe(self, flag: str) -> str:
        """The full text on a flag that `find` knows: `explain`, and the values that are taken because they ask for
        nothing."""
        known, text = self.find(flag), self.explain(flag)
        if known is None or not isinstance(known.harmless, list) or not known.harmless:
            return text
        return f"{text} Taken as {' or '.join(map(str, known.harmless))}, which asks for nothing."

    def explain(self, flag: str, *, named: str | None = None) -> str:
        """A sentence on a flag that the command does not take; `named` is its spelling in the table, if known."""
        named = named or self._name(flag)
        if named is not None:
            known = self.unsupported[named]
            return f"{flag} {'changes nothing' if known.is_inert else 'is not supported'}: {known.reason}"
        near = get_close_matches(flag, [*sorted(self.known), *self.unsupported], n=1, cutoff=0.6)
        if not near:
            return f"there is no option {flag}; --help=all lists them."
        hint = f"there is no option {flag}; did you mean {near[0]}?"
        return hint if near[0] in self.known else f"{hint} {self.explain(near[0])}"

    def _name(self, flag: str) -> str | None:
        """The spelling of `flag` in the table: `--no-x` and `--x.key` stand there as `--x`, `-O3` as `-O`."""
        candidates = [flag, flag.split(".")[0].removesuffix("+")]
        candidates += ["--" + name.removeprefix("--no-") for name in candidates if name.startswith("--no-")]
        return next((name for name in candidates if name in self.unsupported), None)
