"""The memory that waiting requests hold."""

from collections.abc import Iterator
from typing import Any

from quire.core.scheduling.request import Request

TOKEN_BYTES = 64
"""Of a token's Python integer and its places in lists, in engine and frontend."""


class QueuedBytes:
    """Adds up what waiting requests hold. What several of them share counts once: prompts of sequences of a request,
    and grammars.

    Attributes:
        total: bytes.
    """

    def __init__(self) -> None:
        self.total = 0
        self._users: dict[Any, int] = {}  # waiting requests by what they share

    def add(self, request: Request) -> None:
        """Counts a request that waits."""
        for shared, num_bytes in _parts(request):
            users = self._users.get(shared, 0)
            self._users[shared] = users + 1
            if not users:
                self.total += num_bytes

    def remove(self, request: Request) -> None:
        """Counts a request no more."""
        for shared, num_bytes in _parts(request):
            self._users[shared] -= 1
            if not self._users[shared]:
                del self._users[shared]
                self.total -= num_bytes


def _parts(request: Request) -> Iterator[tuple[Any, int]]:
    """What a request holds, and its bytes."""
    prompt, grammar = request.prompt, request.grammar
    num_bytes = TOKEN_BYTES * (len(prompt.token_ids) + len(request.prediction))
    if prompt.embeds is not None:
        num_bytes += len(prompt.embeds.rows) + len(prompt.embeds.row_digests)
    if prompt.encoder is not None:
        features = prompt.encoder.features
        num_bytes += TOKEN_BYTES * prompt.encoder.num_rows if features is None else len(features.values)
    num_bytes += sum(item.num_bytes for item in prompt.media)
    yield id(prompt), num_bytes
    if grammar is not None:
        yield grammar.key, len(grammar.data)
