"""llguidance: masks computed on demand, by derivatives and an Earley parser, with limits on each step."""

from collections.abc import Sequence

import llguidance
import numpy as np
import torch

from quire.core.wire.protocol import Vocabulary
from quire.executor.sampling.grammar.matcher import Matcher, MatcherError


class _Tokens:
    """The tokenizer that `LLTokenizer` needs. It also splits text that a grammar forces; any split is valid there."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens: Sequence[bytes] = vocabulary.tokens
        self.eos_token_id = vocabulary.end_token_ids[0]
        self.special_token_ids = vocabulary.end_token_ids
        self._ids = {piece: token_id for token_id, piece in enumerate(self.tokens) if piece}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: bytes | str) -> list[int]:
        """Token ids, the longest first."""
        data = text.encode() if isinstance(text, str) else text
        token_ids, start = [], 0
        while start < len(data):
            ends = range(min(len(data), start + self._longest), start, -1)
            end = next((end for end in ends if data[start:end] in self._ids), None)
            if end is None:
                break  # a byte that no token spells
            token_ids.append(self._ids[data[start:end]])
            start = end
        return token_ids


class GuidanceLoader:
    """Builds matchers from the grammar's text: nothing is loaded, and compilation takes less than a millisecond."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._end_token_ids = frozenset(vocabulary.end_token_ids)
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Tokens(vocabulary)),
            n_vocab=len(vocabulary.tokens),
            eos_token=vocabulary.end_token_ids,
        )

    def load(self, data: bytes) -> llguidance.LLMatcher:
        return llguidance.LLMatcher(self._tokenizer, data.decode(), log_level=0)

    def matcher(self, loaded: object) -> "GuidanceMatcher":
        assert isinstance(loaded, llguidance.LLMatcher)
        return GuidanceMatcher(loaded.deep_copy(), self._end_token_ids)


class GuidanceMatcher(Matcher):
    def __init__(self, matcher: llguidance.LLMatcher, end_token_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._end_token_ids = end_token_ids

    def fill(self, bitmask: np.ndarray, row: int) -> None:
        self.fill_all([self], bitmask, [row])

    def accept(self, token_id: int) -> bool:
        if token_id in self._end_token_ids:  # checked first: a refused end would break the matcher for good
            return self._matcher.is_accepting() and self._matcher.consume_token(token_id)
        return self._matcher.try_consume_tokens([token_id]) == 1  # stops before an end token

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)

    @staticmethod
    def fill_all(matchers: Sequence["GuidanceMatcher"], bitmask: np.ndarray, rows: Sequence[int]) -> None:
        # By address: the library's wrapper looks it up in each row, which takes three times as long as a mask. A tensor
        # knows its own; `ndarray.ctypes` is Python.
        start, row_bytes = torch.from_numpy(bitmask).data_ptr(), bitmask.strides[0]
        for each, row in zip(matchers, rows, strict=True):
            each._matcher.unsafe_compute_mask_ptr(start + row * row_bytes, row_bytes)
            if each._matcher.is_error():
                raise MatcherError(each._matcher.get_error().split("\n")[0][:300])
