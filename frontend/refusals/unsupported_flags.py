"""vLLM's flags that Quire lacks: why, and with which values they ask for nothing.

`unsupported_flags.json` maps a section (engine, server, run-batch, bench, sweep) to groups of flags that share one
reason. A flag stands there with all its spellings, and with the values that ask for nothing:

- "off" or "on": a switch, which may be in this state;
- "either": a switch that changes nothing here in any state;
- a list: a flag with values, which may be those of the list;
- "any": a flag with values, which changes nothing here with any of them.

An empty value (null, `None`, an empty text, list or object) asks for nothing always.
"""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

DATA = "unsupported_flags.json"
SWITCH_STATES: dict[str, tuple[bool, ...]] = {"off": (False,), "on": (True,), "either": (False, True)}


@dataclass(frozen=True)
class UnsupportedFlag:
    """A flag of vLLM's that Quire does not have. `harmless` is as in the file."""

    reason: str
    harmless: str | list[Any]

    @property
    def is_switch(self) -> bool:
        """True if the flag takes no value."""
        return isinstance(self.harmless, str) and self.harmless in SWITCH_STATES

    @property
    def is_inert(self) -> bool:
        """True if the flag changes nothing with any value."""
        return self.harmless in ("any", "either")

    def asks_for_nothing(self, value: Any) -> bool:
        """Returns True if Quire already does what the flag asks with this value: text, or of a type that YAML and
        Python have.

        An object or a list asks for nothing if each value in it does.
        """
        value = _plain(value)
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, list):
            return all(self.asks_for_nothing(each) for each in value)
        if value is None or self.harmless == "any":
            return True
        if isinstance(self.harmless, str):
            return value in SWITCH_STATES[self.harmless]
        return value in [_plain(each) for each in self.harmless]


@functools.cache
def unsupported(section: str) -> Mapping[str, UnsupportedFlag]:
    """The unsupported flags of one section, by each of their spellings."""
    sections = json.loads(files("quire.frontend.refusals").joinpath(DATA).read_text(encoding="utf-8"))
    return {
        spelling: UnsupportedFlag(group["reason"], harmless)
        for group in sections[section]
        for spellings, harmless in group["flags"].items()
        for spelling in spellings.split(", ")
    }


def _plain(value: Any) -> Any:
    """The value that a text spells, so that `1`, `1.0` and 1 are equal, and so are `AUTO` and `auto`."""
    if not isinstance(value, str):
        return value
    text = value.strip().lower()
    if text in ("", "none", "null"):
        return None
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return text
