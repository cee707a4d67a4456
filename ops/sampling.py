"""The operations that choose tokens: masks of grammars, the likeliest token of a row of logits, and draws."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes; kernels read and write so many at a time

MAX_SCORED = 20
"""The likeliest tokens of a row whose scores a recording finds: as many as OpenAI's API has."""


def new_tokens(num_rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Uninitialized ids [num_rows] int64, and whether each is usable [num_rows] bool, in one piece of memory.

    So one copy brings both to the host.
    """
    return tokens_in(torch.empty(num_token_bytes(num_rows), dtype=torch.uint8, device=device), num_rows)


def num_token_bytes(num_rows: int) -> int:
    """Counts the bytes of the memory of `new_tokens`."""
    return _start_of_usable(num_rows) + num_rows


def tokens_in(memory: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Returns the tokens that lie in `memory` as those of `new_tokens` do."""
    start = _start_of_usable(num_rows)
    return memory[: 8 * num_rows].view(torch.int64), memory[start : start + num_rows].view(torch.bool)


def _start_of_usable(num_rows: int) -> int:
    return -(-8 * num_rows // _ALIGNMENT) * _ALIGNMENT


class RowParameters(NamedTuple):
    """What requests ask of the sampler, on the device: each [num_rows].

    Attributes:
        slots: int64; rows of `TokenPlaces.table`.
        positions: int64; the place that the new token will take in its sequence, and the number of tokens before it.
        num_unnamed: int32; leading tokens without valid ids.
        num_prompt_tokens: int32.
        starts: int64; the bits of `draw`'s.
        is_greedy: int8; 1: the likeliest token is chosen, and the limits below do not matter.
        temperature: float32.
        log_min_p: float32; -inf: no limit.
        top_k: int64; the vocabulary's size: no limit.
        top_p: float64; 1: no limit.
        repetition, frequency, presence: float32; penalties. 1, 0 and 0: none.
    """

    slots: Tensor
    positions: Tensor
    num_unnamed: Tensor
    num_prompt_tokens: Tensor
    starts: Tensor
    is_greedy: Tensor
    temperature: Tensor
    log_min_p: Tensor
    top_k: Tensor
    top_p: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor


class ScorePlaces(NamedTuple):
    """Where the scores of a step's tokens go, on the device.

    Attributes:
        ring: [num_turns, rows, 2 * (1 + MAX_SCORED) + 1] int32; as `read_scores` finds them.
        are_logprobs: scores are log-probabilities; else logits.
    """

    ring: Tensor
    are_logprobs: bool


def new_scores(num_turns: int, num_rows: int, device: torch.device) -> Tensor:
    """Zeros, as the ring of `ScorePlaces`."""
    return torch.zeros(num_turns, num_rows, 2 * (1 + MAX_SCORED) + 1, dtype=torch.int32, device=device)


def read_scores(packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Reads rows of the ring of `ScorePlaces`, [num_rows, ...].

    Returns ids [num_rows, 1 + MAX_SCORED] int32: the chosen token, then the likeliest, best first, of equally likely
    ones that with the lowest id; their scores, float32; the chosen token's place by likelihood, from 1, [num_rows].
    """
    count = 1 + MAX_SCORED
    return packed[:, :count], packed[:, count : 2 * count].contiguous().view(torch.float32), packed[:, 2 * count]


class TokenPlaces(NamedTuple):
    """Where a step's chosen tokens go, on the device.

    Attributes:
        table: [max_num_seqs, columns] int32; known tokens of each request, at their positions.
        memory: [more than those] int32; the table's memory, and spare places behind it.
        places: [num_rows] int64; of the tokens, in `memory`.
        ring: [num_turns, bytes] uint8; the tokens of one step after the other, as `tokens_in` finds them.
        turn: [1] int64; the step's row of `ring`.
        scores: None: nobody asks for scores.
    """

    table: Tensor
    memory: Tensor
    places: Tensor
    ring: Tensor
    turn: Tensor
    scores: ScorePlaces | None = None


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

    @abstractmethod
    def is_recordable(self, logits: Tensor) -> bool:
        """Returns True if a recording should hold `choose` for logits of this type and shape."""

    @abstractmethod
    def choose(self, logits: Tensor, parameters: RowParameters | None, to: TokenPlaces) -> None:
        """Chooses a token for each row of `logits` [num_rows, vocab_size], and writes it to the table and the ring.

        The tokens are those of the operations above in this order: penalties (`executor/sampling/penalties.py`),
        temperature, min-p, top-k, top-p, and a draw or the likeliest token. `parameters` None: the likeliest tokens of
        unchanged logits. All values are on the device, and the host reads none. The logits stay as they are. Scores are
        those of `logits`, which have at least `MAX_SCORED` columns.
        """
