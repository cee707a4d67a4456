"""The vocabulary for the matchers of grammars: the bytes that each token of a model spells."""

from collections.abc import Collection

from quire.core.wire.protocol import Vocabulary
from quire.frontend.text.tokenizer import Tokenizer

PREFIX = "quire-vocabulary-"
"""Names of memory files with vocabularies begin so; the vocabulary's own name follows."""


def make_vocabulary(tokenizer: Tokenizer, name: str, vocab_size: int, end_token_ids: Collection[int]) -> Vocabulary:
    """The vocabulary `name`: "all", or "text" without special tokens, which no text contains."""
    silent = set(end_token_ids) if name == "all" else tokenizer.special_token_ids | set(end_token_ids)
    tokens = [b"" if token_id in silent else tokenizer.piece(token_id) for token_id in range(vocab_size)]
    return Vocabulary(tokens, list(end_token_ids))
