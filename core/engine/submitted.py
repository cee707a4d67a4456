"""The state of unfinished requests, which the client alone keeps."""

from collections.abc import Callable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from quire.core.engine.engine_link import EngineLink
from quire.core.wire.protocol import EngineRequest, RequestDelta, SequenceStart

SUSPECT = 2
"""Crashes in a row, without any token between them, after which a request is a suspect."""

OnDelta = Callable[[RequestDelta], None]


class Submitted(Struct, eq=False):
    """A request with unfinished sequences.

    Attributes:
        blocks: see `EngineSelector.blocks`.
        link: the engine that has it, or will have it when it is ready.
        is_sent: that engine has it.
        num_sent: how often an engine was sent it.
        before: sequences and delivered tokens when it was last sent.
        blame: crashes of engines that had it. Those before its newest token do not count, except the last of them.
    """

    request: EngineRequest
    num_unfinished: int
    blocks: list[int]
    link: EngineLink
    is_sent: bool = False
    num_sent: int = 0
    before: tuple[int, int] = (0, 0)
    blame: int = 0

    @property
    def is_suspect(self) -> bool:
        """True if it may be the reason for crashes."""
        return self.blame >= SUSPECT

    def on_sent(self, request: EngineRequest) -> None:
        """Notes that its engine was sent it, or the rest of it."""
        self.is_sent = True
        self.num_sent += 1
        starts = request.sequences
        self.before = len(starts), sum(len(start.output_token_ids) for start in starts)

    def has_progressed(self, sequences: "Sequence[Tracked]") -> bool:
        """True if it got a token since it was sent.

        Args:
            sequences: those that are unfinished now.
        """
        return len(sequences) < self.before[0] or sum(len(each.delivered) for each in sequences) > self.before[1]

    def on_crash(self, sequences: "Sequence[Tracked]") -> None:
        """Notes a crash of the engine that had it."""
        self.blame = 1 if self.has_progressed(sequences) else self.blame + 1


class Tracked(Struct, eq=False):
    """One unfinished sequence."""

    submitted: Submitted
    start: SequenceStart
    on_delta: OnDelta
    delivered: list[int]
    is_retried: bool = False  # after a failure that might pass


def num_tokens(request: EngineRequest) -> int:
    """The tokens of a prompt, those for the encoder included, and of the outputs after which its sequences resume."""
    num_encoded = 0 if request.encoder is None else request.encoder.num_rows
    num_resumed = sum(len(start.output_token_ids) for start in request.sequences)
    return num_encoded + len(request.prompt_token_ids) + num_resumed


def continued(request: EngineRequest, sequences: Sequence[Tracked]) -> EngineRequest:
    """The request with these sequences alone, each continuing after its delivered tokens."""
    starts = [replace(each.start, output_token_ids=each.delivered) for each in sequences]
    return replace(request, sequences=starts, is_accepted=True)
