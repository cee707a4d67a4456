"""Refuses flags: known ones that Quire does not support, each with its reason, and unknown ones.

`unsupported_flags.json` maps a section (engine, server, run-batch, bench) to groups of flags that share one reason.
"""

import functools
import json
from collections.abc import Iterable
from difflib import get_close_matches
from importlib.resources import files

DATA = "unsupported_flags.json"


@functools.cache
def unsupported(section: str) -> dict[str, str]:
    """Reason by flag, for one section."""
    sections = json.loads(files("quire.frontend.launch").joinpath(DATA).read_text(encoding="utf-8"))
    return {flag: group["reason"] for group in sections[section] for flag in group["flags"]}


class Refusals:
    """Explains why a command does not take a flag."""

    def __init__(self, known: Iterable[str], sections: Iterable[str]) -> None:
        self.known = list(known)
        self.sections = list(sections)

    @property
    def reasons(self) -> dict[str, str]:
        """Reason by unsupported flag, without the flags that the command takes."""
        merged = {flag: reason for section in self.sections for flag, reason in unsupported(section).items()}
        return {flag: reason for flag, reason in merged.items() if flag not in self.known}

    def explain(self, flag: str) -> str:
        """One sentence about a flag (dashes, no value) that the command does not take."""
        named = self._unsupported_name(flag)
        if named is not None:
            return f"{flag} is not supported: {self.reasons[named]}"
        near = get_close_matches(flag, [*self.known, *self.reasons], n=1, cutoff=0.6)
        if not near:
            return f"there is no option {flag}; --help=all lists them."
        hint = f"there is no option {flag}; did you mean {near[0]}?"
        return hint if near[0] in self.known else f"{hint} That is not supported: {self.reasons[near[0]]}"

    def _unsupported_name(self, flag: str) -> str | None:
        candidates = [flag, flag.split(".")[0].removesuffix("+")]
        candidates += ["--" + name.removeprefix("--no-") for name in candidates if name.startswith("--no-")]
        if flag.startswith("-O") and (flag[2:].isdigit() or flag[2:3] == "."):
            candidates.append("-O")
        return next((name for name in candidates if name in self.reasons), None)
