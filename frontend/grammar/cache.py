"""An LRU cache of compiled grammars, bounded in bytes."""

from collections import OrderedDict

from quire.core.wire.protocol import Grammar


class GrammarCache:
    """Compiled grammars by key; the least recently used ones are dropped first.

    Args:
        max_bytes: limit of the grammars' compressed data.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._grammars: OrderedDict[bytes, Grammar] = OrderedDict()
        self.num_bytes = 0

    def get(self, key: bytes) -> Grammar | None:
        """The grammar of `key`, marked as just used; None if it is not in the cache."""
        grammar = self._grammars.get(key)
        if grammar is not None:
            self._grammars.move_to_end(key)
        return grammar

    def put(self, grammar: Grammar) -> None:
        """Adds a grammar, unless it is larger than the whole cache."""
        if grammar.key in self._grammars or len(grammar.data) > self._max_bytes:
            return
        self._grammars[grammar.key] = grammar
        self.num_bytes += len(grammar.data)
        while self.num_bytes > self._max_bytes:
            _, oldest = self._grammars.popitem(last=False)
            self.num_bytes -= len(oldest.data)

    def __len__(self) -> int:
        return len(self._grammars)
