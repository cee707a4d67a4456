"""A trial of a grammar for llguidance: random texts, to find here, and not in a worker, a grammar that cannot go on."""

import random

import llguidance
import numpy as np

from quire.frontend.grammar.backends.backend import GrammarError

_END = 256
_SPACE = frozenset(b" \t\r\n")
_MARKS = frozenset(b'{}[],:"')
_NUM_TEXTS = 8
_NUM_STEPS = 64
_MAX_SPACE = 256
"""Bytes of whitespace alone after which nothing else will come."""


class _Bytes:
    """A tokenizer with bytes for tokens."""

    bos_token_id = None
    eos_token_id = _END
    special_token_ids = (_END,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


class Trial:
    """Samples texts of grammars, with bytes for tokens."""

    def __init__(self) -> None:
        wrapper = llguidance.TokenizerWrapper(_Bytes())
        self._tokenizer = llguidance.LLTokenizer(wrapper, n_vocab=_END + 1, eos_token=_END)

    def run(self, grammar: str) -> None:
        """Samples a few texts.

        Raises:
            GrammarError: a text begun as the grammar allows has no end, or no next byte.
        """
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
        for seed in range(_NUM_TEXTS):
            self._sample(matcher.deep_copy(), random.Random(seed))

    @staticmethod
    def _sample(matcher: llguidance.LLMatcher, dice: random.Random) -> None:
        text, num_spaces = b"", 0
        for _ in range(_NUM_STEPS + _MAX_SPACE):
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = set(np.flatnonzero(np.unpackbits(mask, bitorder="little")[: _END + 1]).tolist())
            others = allowed - _SPACE
            num_spaces = 0 if others else num_spaces + 1
            if matcher.is_error() or not allowed or num_spaces > _MAX_SPACE:
                raise GrammarError(f"nothing can follow {text.decode(errors='replace').strip()[-40:]!r}")
            if others and len(text) > _NUM_STEPS:
                return
            marks = sorted(others & _MARKS)
            byte = dice.choice(marks if marks and dice.random() < 0.5 else sorted(others or allowed))
            if byte == _END:
                return
            matcher.consume_token(byte)
            text += bytes([byte])
