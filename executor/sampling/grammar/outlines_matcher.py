"""outlines-core: a regular expression as a state machine over tokens, built whole at compilation."""

import numpy as np
from outlines_core import Guide, Index

from quire.core.wire.protocol import Vocabulary
from quire.executor.sampling.grammar.matcher import Matcher


class OutlinesLoader:
    """Reads indices in their own binary form. The token behind the model's own marks the end of a text."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._end_token_ids = vocabulary.end_token_ids
        self._mark = len(vocabulary.tokens)

    def load(self, data: bytes) -> Index:
        return Index.from_binary(data)

    def matcher(self, loaded: object) -> "OutlinesMatcher":
        assert isinstance(loaded, Index)
        return OutlinesMatcher(loaded, self._end_token_ids, self._mark)


class OutlinesMatcher(Matcher):
    """The state of an output in an outlines index.

    Args:
        mark: id of the token that marks the end of a text; the model has no such token.
    """

    def __init__(self, index: Index, end_token_ids: list[int], mark: int) -> None:
        self._index = index
        self._end_token_ids = end_token_ids
        self._mark = mark
        self._guide = Guide(index, max_rollback=_MAX_ROLLBACK)
        self._words = np.zeros(mark // 32 + 1, np.int32)

    def fill(self, bitmask: np.ndarray, row: int) -> None:
        self._guide.write_mask_into(self._words.ctypes.data, self._words.size, self._words.itemsize)
        self._words[self._mark // 32] &= ~_bit(self._mark)
        if self._may_end():
            for token_id in self._end_token_ids:
                self._words[token_id // 32] |= _bit(token_id)
        bitmask[row] = self._words[: bitmask.shape[1]]

    def accept(self, token_id: int) -> bool:
        if token_id in self._end_token_ids:
            return self._may_end()
        if not self._guide.accepts_tokens([token_id]):
            return False
        self._guide.advance(token_id, return_tokens=False)
        return True

    def rollback(self, num_tokens: int) -> None:
        self._guide.rollback_state(num_tokens)

    def _may_end(self) -> bool:
        behind = self._index.get_next_state(self._guide.get_state(), self._mark)
        return behind is not None and self._index.is_final_state(behind)


def _bit(token_id: int) -> np.int32:
    return np.uint32(1 << token_id % 32).astype(np.int32)


_MAX_ROLLBACK = 64
