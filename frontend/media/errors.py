"""What a helper finds wrong with a client's media."""

from collections.abc import Iterable


class MediaError(Exception):
    """The data cannot be read. The message is a sentence's end, such as "is no sound file"; the subject is the data."""


class UnknownKeywordError(MediaError):
    """The processor does not know a keyword. The subject is the request's field of them.

    Args:
        name: the keyword.
        known: those that it knows.
    """

    def __init__(self, name: str, known: Iterable[str]) -> None:
        names = ", ".join(sorted(known)) or "none"
        super().__init__(f"has {name!r}, which this model's processor does not know; it knows {names}")


class MissingLibraryError(MediaError):
    """A library of the extra `media` is not installed here."""

    def __init__(self, name: str) -> None:
        super().__init__(f"needs the package {name}, which this server lacks; pip install 'quire[media]'")
