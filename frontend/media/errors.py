"""What a helper finds wrong with a client's media."""


class MediaError(Exception):
    """The data cannot be read. The message is a sentence's end, such as "is no sound file"; the subject is the data."""


class MissingLibraryError(MediaError):
    """A library of the extra `media` is not installed here."""

    def __init__(self, name: str) -> None:
        super().__init__(f"needs the package {name}, which this server lacks; pip install 'quire[media]'")
