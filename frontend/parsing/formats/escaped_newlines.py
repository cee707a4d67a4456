"""Line breaks that a model writes as a backslash and a letter, and that code and formulas mean literally."""

import re
from collections.abc import Callable

from quire.frontend.parsing.event_log import EventLog

_SPANS = {"```": "```", "`": "`", "$$": "$$", "$": "$", "\\(": "\\)", "\\[": "\\]"}
_WORDS = re.compile(r"```|`|\$\$|\$|\\\\+|\\[(\[)\]]|\\r\\n|\\[nr]")
_UNFINISHED = re.compile(r"(?:`+|\$+|\\+(?:r\\?)?)\Z")


class EscapedNewlines:
    """Replaces escaped line breaks in a text that arrives in pieces. Code, formulas and doubled backslashes stay."""

    def __init__(self) -> None:
        self._held = ""  # the end of the text, which may be half of a word
        self._closing = ""  # what ends the code or formula here

    def push(self, text: str) -> str:
        """Adds text; returns the text that is certain by now."""
        text = self._held + text
        match = _UNFINISHED.search(text)
        self._held = match[0] if match else ""
        return _WORDS.sub(self._replace, text.removesuffix(self._held) if match else text)

    def flush(self) -> str:
        """Returns the rest, which ends the text."""
        text, self._held = self._held, ""
        return _WORDS.sub(self._replace, text)

    def _replace(self, match: re.Match[str]) -> str:
        word = match[0]
        if self._closing:
            if word == self._closing:
                self._closing = ""
            return word
        if word in ("\\n", "\\r", "\\r\\n"):
            return "\n"
        self._closing = _SPANS.get(word, "")
        return word


class NewlineLog(EventLog):
    """An `EventLog` of a model that escapes line breaks. Arguments of calls are unchanged.

    Args:
        is_held: the text is held to a client's format, and unchanged, too.
    """

    def __init__(self, make_call_id: Callable[[], str], *, calls_only: bool = False, is_held: bool = False) -> None:
        super().__init__(make_call_id, calls_only=calls_only)
        self._is_held = is_held
        self._breaks = EscapedNewlines()
        self._reasoning_breaks = EscapedNewlines()

    def text(self, text: str) -> None:
        """Adds content."""
        super().text(text if self._is_held else self._breaks.push(text))

    def reasoning(self, text: str) -> None:
        """Adds reasoning."""
        super().reasoning(self._reasoning_breaks.push(text))

    def reasoning_ends(self) -> None:
        """Notes that a block of reasoning was closed."""
        super().reasoning(self._reasoning_breaks.flush())
        super().reasoning_ends()

    def call_starts(self, name: str, call_id: str | None = None) -> None:
        """Begins a call of the function `name`."""
        super().text(self._breaks.flush())
        super().call_starts(name, call_id)

    def finish(self) -> None:
        """Ends the text."""
        super().reasoning(self._reasoning_breaks.flush())
        super().text(self._breaks.flush())
        super().finish()
