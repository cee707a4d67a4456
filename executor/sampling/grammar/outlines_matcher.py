"""outlines-core: a regular expression as a state machine over tokens, built whole at compilation."""

import numpy as np
from outlines_core import Guide, Index

from quire.core.wire.protocol import Vocabulary
from quire.executor.sampling.grammar.matcher import Matcher


class OutlinesLoader:
    """Reads indices in their own binary form."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._end_token_ids = vocabulary.end_token_ids

    def load(self, data: bytes) -> Index:
        return Index.from_binary(data)

    def matcher(self, loaded: object) -> "OutlinesMatcher":
        assert isinstance(loaded, Index)
        return OutlinesMatcher(loaded, self._end_token_ids)


class OutlinesMatcher(Matcher):
    """See `Matcher`."""

    def __init__(self, index: Index, end_token_ids: list[int]) -> None:
        self._index = index
        self._end_token_ids = end_token_ids
        self._guide = Guide(index, max_rollback=_MAX_ROLLBACK)

    def fill(self, bitmask: np.ndarray, row: int) -> None:
        words = bitmask[row]
        self._guide.write_mask_into(words.ctypes.data, words.size, words.itemsize)
        if self._index.is_final_state(self._guide.get_state()):
            for token_id in self._end_token_ids:
                words[token_id // 32] |= np.int32(np.uint32(1 << token_id % 32).astype(np.int32))

    def accept(self, token_id: int) -> bool:
        if token_id in self._end_token_ids:
            return self._index.is_final_state(self._guide.get_state())
        if not self._guide.accepts_tokens([token_id]):
            return False
        self._guide.advance(token_id, return_tokens=False)
        return True

    def rollback(self, num_tokens: int) -> None:
        self._guide.rollback_state(num_tokens)


_MAX_ROLLBACK = 64
