"""Log-probabilities of sampled tokens, of the likeliest ones, and of tokens that a request names."""

from dataclasses import dataclass

import numpy as np
import torch

from quire.core.config.model import LogprobsMode
from quire.core.wire.protocol import NewSlot
from quire.core.wire.row_outputs import TokenLogprobs
from quire.executor.sampling.likeliest import likeliest
from quire.executor.sampling.sampling_feature import SampleBatch
from quire.executor.transfers import Transfer, Transfers, to_device_together
from quire.ops.sampling import MAX_SCORED, read_scores

_NONE = -2
ALL = -1


def scores(logits: torch.Tensor, mode: LogprobsMode) -> torch.Tensor:
    """The values that `mode` selects for `logits` [num_rows, vocab_size] float32, copied, so the logits may change."""
    return logits.log_softmax(-1) if mode.endswith("logprobs") else logits.clone()


@dataclass(frozen=True)
class StepLogprobs:
    """Log-probabilities of one step's rows that asked, on their way to the host.

    Attributes:
        places: [num_asked] int64, on the host; index of the row among the step's sampled rows.
        num_shown: [num_asked] int64, on the host; how many tokens the row wants beside the sampled one.
        by_likelihood: [num_asked] bool, on the host; false where the row named its tokens.
        transfer: of three tensors. Token ids, [num_asked, 1 + most wanted]: the sampled token, then the likeliest, best
            first, or those named. Their values, like the ids, float32. The sampled tokens' places by likelihood,
            [num_asked] int64, 1 for the likeliest.
    """

    places: np.ndarray
    num_shown: np.ndarray
    by_likelihood: np.ndarray
    transfer: Transfer

    def rows(self) -> list[tuple[int, TokenLogprobs]]:
        """(index among sampled rows, log-probabilities) for each row that asked; waits for the device."""
        token_ids, values, nth_likeliest = self._values()
        positions = token_logprobs(token_ids, values, nth_likeliest, self.num_shown, self.by_likelihood)
        return list(zip(self.places.tolist(), positions, strict=True))

    def _values(self) -> list[torch.Tensor]:
        return self.transfer.values()


@dataclass(frozen=True)
class RecordedLogprobs(StepLogprobs):
    """Those that a recording has found, for all rows of its step.

    Attributes:
        transfer: of one tensor, as `read_scores` takes it.
    """

    def _values(self) -> list[torch.Tensor]:
        (packed,) = self.transfer.values()
        return list(read_scores(packed[torch.from_numpy(self.places)]))


def token_logprobs(
    token_ids: torch.Tensor,
    values: torch.Tensor,
    nth_likeliest: torch.Tensor,
    num_shown: np.ndarray,
    by_likelihood: np.ndarray,
) -> list[TokenLogprobs]:
    """Rows of tensors on the host, shaped as in `StepLogprobs`, for the wire."""
    columns = zip(
        token_ids.tolist(),
        values.tolist(),
        nth_likeliest.tolist(),
        (1 + num_shown).tolist(),
        by_likelihood.tolist(),
        strict=True,
    )
    return [TokenLogprobs(ids[:end], row[:end], nth, ranked) for ids, row, nth, end, ranked in columns]


class Logprobs:
    """Looks at the logits before other features change them, or after all have, and again when tokens are known."""

    def __init__(self, max_num_seqs: int, vocab_size: int, mode: LogprobsMode, transfers: Transfers) -> None:
        self._vocab_size = vocab_size
        self._mode = mode
        self._transfers = transfers
        self._num_top = np.full(max_num_seqs, _NONE, np.int64)
        self._named: dict[int, np.ndarray] = {}  # slot to the ids that its request named

    @property
    def of_raw_logits(self) -> bool:
        """True if the values are of the model's own logits, before features change them."""
        return self._mode.startswith("raw")

    def admit(self, request: NewSlot) -> bool:
        """Adds the logprobs parameters of a request that enters a slot; returns True if it wants any."""
        wanted, named = request.sampling.logprobs, request.sampling.logprob_token_ids
        self._named.pop(request.slot, None)
        if named:
            self._num_top[request.slot] = 0
            self._named[request.slot] = np.array(named, np.int64)
        elif wanted is None:
            self._num_top[request.slot] = _NONE
        else:
            self._num_top[request.slot] = self._vocab_size if wanted == ALL else min(wanted, self._vocab_size)
        return bool(named) or wanted is not None

    def used(self, batch: SampleBatch) -> np.ndarray:
        return self._num_top[batch.slots] != _NONE

    @property
    def are_logprobs(self) -> bool:
        """True if the values are log-probabilities, not logits."""
        return self._mode.endswith("logprobs")

    def can_be_recorded(self, batch: SampleBatch) -> bool:
        """Returns True if a recording finds what all rows want: few of the likeliest tokens, by the model's logits."""
        wanted = self._num_top[batch.slots]
        is_small = bool((wanted <= MAX_SCORED).all()) and self._vocab_size >= MAX_SCORED
        return self.of_raw_logits and is_small and not any(slot in self._named for slot in batch.slots.tolist())

    def taken(self, scores: torch.Tensor, slots: np.ndarray) -> RecordedLogprobs:
        """Starts the transfer of what a recording has found, [rows and padding, ...], see `read_scores`."""
        num_top = self._num_top[slots]
        places = np.flatnonzero(num_top != _NONE)
        transfer = self._transfers.to_host([scores])
        return RecordedLogprobs(places, num_top[places], np.ones(len(places), bool), transfer)

    def values(self, logits: torch.Tensor) -> torch.Tensor:
        """[num_asked, vocab_size] float32."""
        return scores(logits, self._mode)

    def of(self, values: torch.Tensor, batch: SampleBatch, places: np.ndarray, sampled: torch.Tensor) -> StepLogprobs:
        """Starts the transfer of log-probabilities. `batch` and `sampled` [num_asked] have only the rows that asked;
        `places` are their indices in the step.
        """
        num_top = self._num_top[batch.slots]
        own_ids = sampled.unsqueeze(1)
        own = values.gather(1, own_ids)
        nth_likeliest = (values > own).sum(-1) + 1
        shown, shown_ids = likeliest(values, int(num_top.max()))
        named = [self._named.get(slot) for slot in batch.slots.tolist()]
        by_likelihood = np.array([ids is None for ids in named])
        num_shown = np.array([num if ids is None else len(ids) for num, ids in zip(num_top, named, strict=True)])
        if not by_likelihood.all():
            shown_ids = self._with_named(shown_ids, named, int(num_shown.max()))
            shown = values.gather(1, shown_ids)
        token_ids = torch.cat([own_ids, shown_ids], 1)
        transfer = self._transfers.to_host([token_ids, torch.cat([own, shown], 1), nth_likeliest])
        return StepLogprobs(places, num_shown, by_likelihood, transfer)

    @staticmethod
    def _with_named(top_ids: torch.Tensor, named: list[np.ndarray | None], width: int) -> torch.Tensor:
        """Widens `top_ids` [num_asked, ...] to `width`, with the ids that a row named at its beginning."""
        own_ids = np.zeros((len(named), width), np.int64)
        named_rows = np.zeros((len(named), 1), bool)
        for row, ids in enumerate(named):
            if ids is not None:
                own_ids[row, : len(ids)] = ids
                named_rows[row] = True
        token_ids, is_named = to_device_together([own_ids, named_rows], top_ids.device)
        own = token_ids[:, : top_ids.shape[1]]
        own.copy_(torch.where(is_named, own, top_ids))
        return token_ids
