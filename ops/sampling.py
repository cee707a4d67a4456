"""The operations that choose tokens: masks of grammars, the likeliest token of a row of logits, and draws."""

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes; kernels read and write so many at a time


def new_tokens(num_rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Uninitialized ids [num_rows] int64, and whether each is usable [num_rows] bool, in one piece of memory.

    So one copy brings both to the host.
    """
    start = -(-8 * num_rows // _ALIGNMENT) * _ALIGNMENT
    memory = torch.empty(start + num_rows, dtype=torch.uint8, device=device)
    return memory[: 8 * num_rows].view(torch.int64), memory[start:].view(torch.bool)


class SamplingOperations(ABC):
    """The operations of sampling on one kind of device."""

    @abstractmethod
    def apply_bitmask(self, logits: Tensor, rows: np.ndarray, bitmask: np.ndarray) -> None:
        """Sets the logits of tokens whose bit is not set to -inf, in place.

        `logits` is [num_rows, vocab_size] of any float type. `rows` [n] int64, on the host, are the distinct rows to
        mask. `bitmask` [n, ceil(vocab_size / 32)] int32, on the host: bit i % 32 of word i // 32 is token i.
        """

    @abstractmethod
    def likeliest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest token of each row of `logits` [num_rows, vocab_size].

        Returns ids [num_rows] int64, and [num_rows] bool: false if the row has a NaN or its greatest logit is infinite.
        """

    @abstractmethod
    def draw(self, logits: Tensor, starts: np.ndarray, positions: np.ndarray) -> tuple[Tensor, Tensor]:
        """Draws a token for each row of `logits` [num_rows, vocab_size] by inverting the cumulative softmax.

        Row r is inverted at element r of `quire.ops.random.uniforms(starts, positions)`; `starts` [num_rows] uint64 and
        `positions` [num_rows] int64 are on the host. A token whose logit is -inf is never drawn. Returns ids and bools
        like `likeliest`; false if the logits are no distribution (NaN, infinite).
        """

    @abstractmethod
    def keep_min_p(self, logits: Tensor, log_min_p: np.ndarray) -> Tensor:
        """Keeps the tokens of `logits` [num_rows, vocab_size] float32 that are likely enough beside the likeliest.

        `log_min_p` [num_rows] float32, on the host: the least difference to the row's greatest logit that stays. The
        logits of other tokens become -inf, perhaps in place. A row with a NaN stays unusable, here and below.
        """

    @abstractmethod
    def keep_top_k(self, logits: Tensor, top_k: np.ndarray) -> Tensor:
        """Keeps the row's `top_k` [num_rows] int64, on the host, greatest of `logits`, as `keep_min_p` does.

        1 ≤ top_k ≤ vocab_size. Tokens whose logits equal the least that stays do so as well.
        """

    @abstractmethod
    def keep_top_p(self, logits: Tensor, top_p: np.ndarray) -> Tensor:
        """Keeps the fewest greatest of `logits` whose probability reaches `top_p`, as `keep_min_p` does; at least one.

        `top_p` [num_rows] float64, on the host. Tokens exactly as likely as the least that stays do so as well.
        """
