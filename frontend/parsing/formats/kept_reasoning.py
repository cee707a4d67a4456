"""Reasoning that stays in the answer, between the markers that the model itself uses."""

from msgspec import Struct

from quire.frontend.parsing.answer_sink import AnswerSink
from quire.frontend.parsing.event_log import EventLog
from quire.frontend.parsing.reader import Markers, Reader, Steps


class KeptReasoning(Struct, frozen=True, kw_only=True):
    """Reasoning is content, and the marker that the prompt wrote is repeated before it."""

    begin: str = "<think>"
    end: str = "</think>"

    @property
    def markers(self) -> tuple[str, ...]:
        """Literals of the format that may be special tokens."""
        return (self.begin, self.end)

    @property
    def frames(self) -> bool:
        """True if calls stand within its marks, too."""
        return False

    def is_opened(self, prompt_text: str) -> bool:
        """True if an answer to this prompt begins within reasoning."""
        return not prompt_text[-256:].rstrip().endswith(self.end)

    def read(self, reader: Reader, log: EventLog, answer: AnswerSink, *, opened: bool) -> Steps[None]:
        """Passes a whole text on to `answer`."""
        if opened:
            answer.push(self.begin)
        yield from reader.until(Markers(()), answer.push)
