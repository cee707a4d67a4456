"""What every shape of calls can do. A shape is the code; a model's format is the data that fills its fields."""

from typing import Any

from msgspec import Struct

from quire.frontend.parsing.call_tags import CallTags
from quire.frontend.parsing.event_log import EventLog
from quire.frontend.parsing.reader import Reader, Steps
from quire.frontend.parsing.tools import Tool


class CallShape(Struct, frozen=True, kw_only=True):
    """How a model writes calls.

    Attributes:
        dropped: of `stray`, what is never content, called or not.
    """

    dropped: tuple[str, ...] = ()

    @property
    def triggers(self) -> tuple[str, ...]:
        """What may begin a call."""
        raise NotImplementedError

    @property
    def markers(self) -> tuple[str, ...]:
        """Literals of the format that may be special tokens, so that they must not be skipped in the text."""
        return ()

    @property
    def stray(self) -> tuple[str, ...]:
        """Ends that are no content even where they stand alone, once there was a call."""
        return ()

    def read(self, trigger: str, reader: Reader, log: EventLog, tools: dict[str, Tool]) -> Steps[None]:
        """Reads the calls after a trigger that was just read, as far as they go.

        Raises:
            Malformed: there is no call; what the reader has on record is content.
        """
        raise NotImplementedError

    def call_tags(self, schemas: dict[str, dict[str, Any]]) -> CallTags | None:
        """The format around the arguments' schemas, by function; None for a notation that no grammar describes."""
        return None
