"""The tokens of a draft model as those of its target."""

from typing import Protocol

import torch
from torch import Tensor

from quire.core.config.resolved import SharedVocabulary


class DraftVocabulary(Protocol):
    """Turns the target's ids into the draft model's, and the draft model's logits into those of the target's ids."""

    def translate(self, token_ids: Tensor) -> None:
        """Replaces the target's `token_ids` [num_tokens] int64 by those that the draft model reads, in place."""
        ...

    def logits(self, logits: Tensor) -> Tensor:
        """Returns `logits` [num_rows, tokens of the draft model] as [num_rows, tokens of the target]."""
        ...


class SameTokens:
    """The target's tokens are the draft model's first ones.

    Args:
        vocab_size: of the target.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def translate(self, token_ids: Tensor) -> None:
        """Does nothing."""

    def logits(self, logits: Tensor) -> Tensor:
        return logits[:, : self._vocab_size]


class TokensByText:
    """The draft model has ids of its own. Tokens whose text it lacks as one token are never drafts."""

    def __init__(self, shared: SharedVocabulary, device: torch.device) -> None:
        self._ids = torch.tensor(shared.input_ids, dtype=torch.int64, device=device)
        columns = torch.tensor(shared.output_ids, dtype=torch.int64, device=device)
        self._columns = columns.clamp(min=0)
        self._is_missing = columns < 0

    def translate(self, token_ids: Tensor) -> None:
        token_ids.copy_(self._ids[token_ids])

    def logits(self, logits: Tensor) -> Tensor:
        return logits[:, self._columns].masked_fill_(self._is_missing, -torch.inf)
