"""Strings of calls, without the white space that belongs to the format around them."""


class TrimmedText:
    """A string without the format's white space around it. White space that may be at the end is held back."""

    def __init__(self, trim: str) -> None:
        self._trim = trim
        self._held: list[str] = []
        self._at_start = True

    def push(self, text: str) -> str:
        """Adds text; returns the text that is certain by now."""
        if not self._trim or not text:
            return text
        by_line = self._trim == "newline"
        if self._at_start:
            text = text.removeprefix("\n") if by_line else text.lstrip()
            self._at_start = not by_line and not text
        body = text.removesuffix("\n") if by_line else text.rstrip()
        if not body and not by_line:
            self._held.append(text)
            return ""
        if not text:
            return ""
        body = "".join(self._held) + body
        self._held = [text[len(text.removesuffix("\n") if by_line else text.rstrip()) :]]
        return body
