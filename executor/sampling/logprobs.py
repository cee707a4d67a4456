"""Log-probabilities of sampled tokens under the model's own distribution, before penalties, masks and temperature."""

from dataclasses import dataclass

import numpy as np
import torch

from quire.core.protocol import NewSlot, TokenLogprobs
from quire.executor.sampling.feature import SampleBatch

_NONE = -2
_ALL = -1


@dataclass(frozen=True)
class StepLogprobs:
    """What one step owes to the rows that asked; tensors on the device until `rows` reads them.

    Attributes:
        places: [num_asked] int64, on the host; index of the row among the step's sampled rows.
        num_top: [num_asked] int64, on the host; how many of the likeliest tokens the row wants.
        token_ids: [num_asked, 1 + most wanted]; the sampled token, then the likeliest, best first.
        values: like `token_ids`, float32.
        ranks: [num_asked] int64; 1 for a sampled token that is the likeliest.
    """

    places: np.ndarray
    num_top: np.ndarray
    token_ids: torch.Tensor
    values: torch.Tensor
    ranks: torch.Tensor

    def rows(self) -> list[tuple[int, TokenLogprobs]]:
        """(index among sampled rows, log-probabilities) for each row that asked; waits for the device."""
        token_ids, values, ranks = self.token_ids.cpu(), self.values.cpu(), self.ranks.tolist()
        return [
            (place, TokenLogprobs(token_ids[i, : 1 + num].tolist(), values[i, : 1 + num].tolist(), ranks[i]))
            for i, (place, num) in enumerate(zip(self.places.tolist(), self.num_top.tolist(), strict=True))
        ]


class Logprobs:
    """Looks at the logits twice: before other features change them, and when the tokens are known."""

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._num_top = np.full(max_num_seqs, _NONE, np.int64)

    def admit(self, request: NewSlot) -> None:
        wanted = request.sampling.logprobs
        if wanted is None:
            self._num_top[request.slot] = _NONE
        else:
            self._num_top[request.slot] = self._vocab_size if wanted == _ALL else min(wanted, self._vocab_size)

    def used(self, batch: SampleBatch) -> np.ndarray:
        return self._num_top[batch.slots] != _NONE

    def distribution(self, logits: torch.Tensor) -> torch.Tensor:
        """Log-probabilities [num_asked, vocab_size] float32; a copy, so the logits may change afterwards."""
        return logits.log_softmax(-1)

    def of(
        self, distribution: torch.Tensor, batch: SampleBatch, places: np.ndarray, sampled: torch.Tensor
    ) -> StepLogprobs:
        """`batch` and `sampled` [num_asked] hold only the rows that asked; `places` says where they are in the step."""
        num_top = self._num_top[batch.slots]
        own_ids = sampled.unsqueeze(1)
        own = distribution.gather(1, own_ids)
        ranks = (distribution > own).sum(-1) + 1
        values, token_ids = distribution.topk(int(num_top.max()), dim=-1)
        return StepLogprobs(places, num_top, torch.cat([own_ids, token_ids], 1), torch.cat([own, values], 1), ranks)
