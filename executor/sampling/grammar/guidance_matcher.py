"""llguidance: masks computed when they are asked for, by derivatives and an Earley parser, with limits on each step."""

from collections.abc import Sequence

import llguidance
import numpy as np
from llguidance.numpy import fill_next_token_bitmask

from quire.core.protocol import Vocabulary
from quire.executor.sampling.grammar.matcher import MatcherError


class _Tokens:
    """What `LLTokenizer` asks of a tokenizer. It never tokenizes here: tokens come from the model alone."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens: Sequence[bytes] = vocabulary.tokens
        self.eos_token_id = vocabulary.end_token_ids[0]
        self.special_token_ids = vocabulary.end_token_ids

    def __call__(self, text: bytes | str) -> list[int]:
        return []


class GuidanceLoader:
    """A grammar is its own text: there is nothing to load, and compilation takes a matcher less than a millisecond."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Tokens(vocabulary)),
            n_vocab=len(vocabulary.tokens),
            eos_token=vocabulary.end_token_ids,
        )

    def load(self, data: bytes) -> llguidance.LLMatcher:
        return llguidance.LLMatcher(self._tokenizer, data.decode(), log_level=0)

    def matcher(self, loaded: object) -> "GuidanceMatcher":
        assert isinstance(loaded, llguidance.LLMatcher)
        return GuidanceMatcher(loaded.deep_copy())


class GuidanceMatcher:
    """See `Matcher`."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    def fill(self, bitmask: np.ndarray, row: int) -> None:
        fill_next_token_bitmask(self._matcher, bitmask, row)
        if self._matcher.is_error():
            raise MatcherError(self._matcher.get_error().split("\n")[0][:300])

    def accept(self, token_id: int) -> bool:
        # Asked first: a token that is refused would leave the matcher broken for good.
        if not self._matcher.validate_tokens([token_id]):
            return False
        return self._matcher.consume_token(token_id)

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)
