"""One operation that takes away what grammars do not allow."""

import torch

from quire.executor.sampling.grammar.xgrammar_matcher import xgrammar


def apply_bitmask(logits: torch.Tensor, bitmask: torch.Tensor) -> torch.Tensor:
    """Sets logits to -inf, in place, where the token's bit is not set.

    Args:
        logits: [num_rows, vocab_size] float32.
        bitmask: [num_rows, ceil(vocab_size / 32)] int32, on the same device; bit i % 32 of word i // 32 is token i.
    """
    xgrammar.apply_token_bitmask_inplace(logits, bitmask)
    return logits
