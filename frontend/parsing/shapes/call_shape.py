"""The base of all shapes of calls. A shape is code; a model's format is a shape whose fields are filled with data."""

from typing import Any, Self

from msgspec import Struct

from quire.frontend.parsing.event_log import EventLog
from quire.frontend.parsing.reader import Reader, Steps
from quire.frontend.parsing.shapes.call_tags import CallTags
from quire.frontend.parsing.tools import Tool


class CallShape(Struct, frozen=True, kw_only=True):
    """How a model writes calls.

    Attributes:
        dropped: markers of `stray` that are never content, even in an answer without calls.
    """

    dropped: tuple[str, ...] = ()

    @property
    def triggers(self) -> tuple[str, ...]:
        """Markers that may begin a call."""
        raise NotImplementedError

    @property
    def markers(self) -> tuple[str, ...]:
        """Literals of the format that may be special tokens, and must not be skipped in the text."""
        return ()

    @property
    def stray(self) -> tuple[str, ...]:
        """Closing markers that are not content after a call, even if nothing opened them."""
        return ()

    @property
    def follows_text(self) -> bool:
        """True if a grammar of calls alone allows text before them."""
        return False

    def read(self, trigger: str, reader: Reader, log: EventLog, tools: dict[str, Tool]) -> Steps[None]:
        """Reads the calls after a trigger, which was just read.

        Raises:
            Malformed: there is no call; the reader's record is content. If the text ended there and `begins_call`, the
                record is dropped instead.
        """
        raise NotImplementedError

    def begins_call(self, text: str, tools: dict[str, Tool]) -> bool:
        """True if `text`, from a trigger to the end of the answer, can only be the beginning of a call."""
        return text.startswith(tuple(each for each in self.triggers if "<" in each or (each[0] == "[" and each[1:])))

    def with_suffix(self, suffix: str) -> Self:
        """The same format for a checkpoint whose marks end in `suffix`, such as `:6124c78e`."""
        return self

    def call_tags(self, schemas: dict[str, dict[str, Any]]) -> CallTags | None:
        """The format around the arguments' schemas, by function; None if no grammar can describe the format."""
        return None
