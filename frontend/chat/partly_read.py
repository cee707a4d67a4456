"""Bodies of requests with parts that the server has no use for."""

from collections.abc import Iterator

from msgspec import Struct


class PartlyRead(Struct, kw_only=True):
    """A body whose lists and dictionaries may hold parts that are ignored, such as tools that a server would run."""

    def ignored_parts(self) -> Iterator[str]:
        """Yields the paths of those parts: `tools[2].web_search`. Fields that no Struct declares are not among them."""
        yield from ()
