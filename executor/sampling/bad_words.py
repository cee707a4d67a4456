"""bad_words: a token that would complete a forbidden sequence cannot be sampled. Prompts may contain such sequences."""

from dataclasses import dataclass

import numpy as np
import torch

from quire.core.wire.protocol import NewSlot
from quire.executor.sampling.sampling_feature import Mask, SampleBatch

_ANY = -1
"""Pads sequences shorter than the longest at their front; matches every token."""


@dataclass(frozen=True)
class _Sequences:
    """One request's forbidden sequences.

    Attributes:
        heads: [num_sequences, longest] int32; all but the last token, at the right end.
        head_lens: [num_sequences] int64.
        last: [num_sequences] int64; the token that must not follow.
    """

    heads: np.ndarray
    head_lens: np.ndarray
    last: np.ndarray

    @classmethod
    def of(cls, sequences: list[list[int]]) -> "_Sequences":
        longest = max(len(sequence) for sequence in sequences) - 1
        heads = np.array([[_ANY] * (longest + 1 - len(sequence)) + sequence[:-1] for sequence in sequences], np.int32)
        head_lens = np.array([len(sequence) - 1 for sequence in sequences], np.int64)
        last = np.array([sequence[-1] for sequence in sequences], np.int64)
        return cls(heads.reshape(len(sequences), longest), head_lens, last)


class BadWords(Mask):
    """Compares on the device, so that the latest tokens need not return to the host first."""

    def __init__(self, max_num_seqs: int) -> None:
        self._used = np.zeros(max_num_seqs, bool)
        self._sequences: dict[int, _Sequences] = {}  # by slot

    def admit(self, request: NewSlot) -> bool:
        sequences = request.sampling.bad_words_token_ids
        self._used[request.slot] = bool(sequences)
        self._sequences.pop(request.slot, None)
        if sequences:
            self._sequences[request.slot] = _Sequences.of(sequences)
        return bool(sequences)

    def used(self, batch: SampleBatch) -> np.ndarray:
        return self._used[batch.slots]

    def apply(self, logits: torch.Tensor, rows: np.ndarray, batch: SampleBatch) -> None:
        found = [self._sequences[slot] for slot in batch.slots.tolist()]
        owners = np.repeat(np.arange(len(found)), [len(each.last) for each in found])
        last = np.concatenate([each.last for each in found])
        num_generated = (batch.positions - batch.num_prompt_tokens)[owners]
        fits = num_generated >= np.concatenate([each.head_lens for each in found])
        hits = batch.on_device(fits) & self._follows_head(found, owners, batch)
        penalty = torch.zeros(len(owners), dtype=logits.dtype, device=logits.device).masked_fill_(hits, -torch.inf)
        logits.index_put_((batch.on_device(rows[owners]), batch.on_device(last)), penalty, accumulate=True)

    def _follows_head(self, found: list[_Sequences], owners: np.ndarray, batch: SampleBatch) -> torch.Tensor:
        """Compares the newest tokens with the head of each sequence: [num_sequences] bool, on the device.

        `owners` [num_sequences] are the batch's rows to which the sequences belong.
        """
        longest = max(each.heads.shape[1] for each in found)
        heads = np.concatenate(
            [np.pad(each.heads, ((0, 0), (longest - each.heads.shape[1], 0)), constant_values=_ANY) for each in found]
        )
        places = np.maximum(batch.positions[:, None] + np.arange(-longest, 0), 0)  # [num_rows, longest]
        slots = np.broadcast_to(batch.slots[:, None], places.shape)
        newest = batch.table.gather(slots.reshape(-1), places.reshape(-1)).view(places.shape)
        expected = batch.on_device(heads)
        return ((newest[batch.on_device(owners)] == expected) | (expected == _ANY)).all(-1)
