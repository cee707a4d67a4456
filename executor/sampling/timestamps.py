"""Timestamps in transcripts: which of them may come next, and where one must."""

import numpy as np
import torch

from quire.core.wire.output_rules import TimestampRules
from quire.core.wire.protocol import NewSlot
from quire.executor.sampling.sampling_feature import Mask, SampleBatch

_NO_RULES = TimestampRules(0, 0)


class Timestamps(Mask):
    """Masks tokens by `TimestampRules`. It compares on the device, so that the latest tokens need not return first."""

    def __init__(self, max_num_seqs: int) -> None:
        self._used = np.zeros(max_num_seqs, bool)
        self._first, self._end, self._not_used, self._latest = (np.zeros(max_num_seqs, np.int64) for _ in range(4))

    def admit(self, request: NewSlot) -> bool:
        rules = None if request.rules is None else request.rules.timestamps
        slot, found = request.slot, rules or _NO_RULES
        self._used[slot] = rules is not None
        self._first[slot], self._end[slot], self._not_used[slot] = found.first, found.end, found.not_used
        self._latest[slot] = np.iinfo(np.int64).max if found.latest_first is None else found.latest_first
        return rules is not None

    def used(self, batch: SampleBatch) -> np.ndarray:
        return self._used[batch.slots]

    def apply(self, logits: torch.Tensor, rows: np.ndarray, batch: SampleBatch) -> None:
        index = batch.on_device(rows)
        first = batch.column(self._first)
        token = torch.arange(logits.shape[1], device=logits.device)
        stamps = token >= first  # [num_rows, vocab_size]
        forbidden = (token == batch.column(self._not_used)) | self._out_of_turn(token, stamps, batch)
        values = logits[index].float().masked_fill(forbidden, -torch.inf).log_softmax(-1)
        likelihood = values.masked_fill(~stamps, -torch.inf).logsumexp(-1, keepdim=True)
        likeliest_other = values.masked_fill(stamps, -torch.inf).amax(-1, keepdim=True)
        forbidden |= ~stamps & (likelihood > likeliest_other)
        logits[index] = logits[index].masked_fill(forbidden, -torch.inf)

    def _out_of_turn(self, token: torch.Tensor, stamps: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        """Returns the tokens that cannot follow those before: [num_rows, vocab_size] bool."""
        first, count = batch.column(self._first), batch.positions - batch.num_prompt_tokens
        last_is, one_before_is = self._is_stamp(batch, 1) & _column(batch, count > 0), self._is_stamp(batch, 2)
        one_before_is = one_before_is | _column(batch, count < 2)
        begins, is_single = _column(batch, count == 0), last_is & ~one_before_is
        latest = self._latest_stamp(batch)
        # A pair's second timestamp may equal its first; otherwise time goes on.
        earliest = torch.where(latest < 0, first, torch.where(is_single, latest, latest + 1))
        return (
            (last_is & one_before_is & stamps)
            | (is_single & (token < batch.column(self._end)))
            | (stamps & (token < earliest))
            | (begins & (~stamps | (token > batch.column(self._latest))))
        )

    def _is_stamp(self, batch: SampleBatch, places_before: int) -> torch.Tensor:
        """Returns whether the token so many places before the next is a timestamp: [num_rows, 1] bool."""
        places = np.maximum(batch.positions - places_before, 0)
        return batch.table.gather(batch.slots, places).unsqueeze(1) >= batch.column(self._first)

    def _latest_stamp(self, batch: SampleBatch) -> torch.Tensor:
        """Returns the latest timestamp of each output, -1 without one: [num_rows, 1] int64."""
        tokens = batch.table.token_ids[batch.on_device(batch.slots)].long()
        place = torch.arange(tokens.shape[1], device=tokens.device)
        is_output = (place >= _column(batch, batch.num_prompt_tokens)) & (place < _column(batch, batch.positions))
        return tokens.masked_fill(~is_output | (tokens < batch.column(self._first)), -1).amax(1, keepdim=True)


def _column(batch: SampleBatch, values: np.ndarray) -> torch.Tensor:
    """Returns values by row as [num_rows, 1], on the device."""
    return batch.on_device(values).unsqueeze(1)
