"""XGrammar: token masks that were computed ahead, at compilation (arXiv:2411.15100)."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.core.light_import import without
from quire.core.wire.protocol import Vocabulary
from quire.executor.sampling.grammar.matcher import Matcher

with without("transformers"):  # for a class method that is not used here
    import xgrammar


class XGrammarLoader:
    """Reads compiled grammars as `CompiledGrammar.serialize_json` wrote them."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._info = xgrammar.TokenizerInfo(
            vocabulary.tokens,
            xgrammar.VocabType.RAW,
            vocab_size=len(vocabulary.tokens),
            stop_token_ids=vocabulary.end_token_ids,
        )

    def load(self, data: bytes) -> Any:
        return xgrammar.CompiledGrammar.deserialize_json(data.decode(), self._info)

    def matcher(self, loaded: Any) -> "XGrammarMatcher":
        return XGrammarMatcher(loaded)


_TOGETHER = xgrammar.BatchGrammarMatcher(max_threads=1)
"""Fills masks on the calling thread: more threads would cost more than masks of a microsecond each."""


class XGrammarMatcher(Matcher):
    def __init__(self, grammar: Any) -> None:
        self._matcher = xgrammar.GrammarMatcher(grammar)

    def fill(self, bitmask: np.ndarray, row: int) -> None:
        self._matcher.fill_next_token_bitmask(bitmask, row)

    def accept(self, token_id: int) -> bool:
        return self._matcher.accept_token(token_id)

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)

    @staticmethod
    def fill_all(matchers: Sequence["XGrammarMatcher"], bitmask: np.ndarray, rows: Sequence[int]) -> None:
        # One call, because each call releases the interpreter's lock, which the engine's loop may take. `accept` has a
        # batched form too, but returns an array of XGrammar's own, and reading each item is another call.
        if len(matchers) == 1:
            matchers[0].fill(bitmask, rows[0])
        else:
            _TOGETHER.batch_fill_next_token_bitmask([each._matcher for each in matchers], bitmask, list(rows))
