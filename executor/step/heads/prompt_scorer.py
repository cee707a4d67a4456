"""Log-probabilities of each prompt token given those before it, computed along with the prompt."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from quire.core.config.model import LogprobsMode
from quire.core.wire.protocol import NewSlot
from quire.core.wire.row_outputs import PromptLogprobs, TokenLogprobs
from quire.executor.sampling.likeliest import likeliest
from quire.executor.sampling.logprobs import ALL, scores, token_logprobs
from quire.executor.sampling.token_table import TokenTable
from quire.executor.step.heads.head import HeadRow, PendingOutput
from quire.executor.transfers import Transfer, Transfers

_NO_IDS = torch.empty(1, 0, dtype=torch.int64)
_MAX_LOGITS = 2**23
"""The most logits at once: a prompt's are computed in slices of this size, because all may not fit in memory."""


@dataclass(frozen=True)
class ScoredPart:
    """The scores of a part of one prompt, on their way to the host.

    Attributes:
        row: in the plan.
        start: position of the first token that is scored.
        num_shown: how many tokens the request wants beside each: the likeliest, then those that it named.
        slices: the part's tokens in pieces: token ids, values and places by likelihood, as in `StepLogprobs`.
    """

    row: int
    start: int
    num_shown: int
    slices: list[Transfer]

    def read(self) -> PromptLogprobs:
        positions: list[TokenLogprobs] = []
        for piece in self.slices:
            token_ids, values, nth_likeliest = piece.values()
            num_rows = len(token_ids)
            num_shown, ranked = np.full(num_rows, self.num_shown), np.ones(num_rows, bool)
            positions += token_logprobs(token_ids, values, nth_likeliest, num_shown, ranked)
        return PromptLogprobs(self.start, positions)


class PromptScorer:
    """Scores prompts, and holds what their requests want, by slot. Nothing changes logits here, so raw and processed
    ones are the same.

    Args:
        compute_logits: hidden states [num_tokens, hidden] of consecutive tokens, and the index of the first in the
            step, to logits [num_tokens, vocab_size].
    """

    def __init__(
        self,
        compute_logits: Callable[[torch.Tensor, int], torch.Tensor],
        vocab_size: int,
        mode: LogprobsMode,
        transfers: Transfers,
    ) -> None:
        self._compute_logits = compute_logits
        self._vocab_size = vocab_size
        self._mode = mode
        self._transfers = transfers
        self._num_top: dict[int, int] = {}  # by slot
        self._named: dict[int, torch.Tensor] = {}  # by slot; [num_prompt_tokens - 1, num_ids] int64, see `_named_ids`

    def admit(self, request: NewSlot) -> None:
        """Adds a request. If it comes with output, its prompt was scored before its preemption or restart."""
        self.release([request.slot])
        sampling = request.sampling
        if not sampling.scores_prompt or len(request.token_ids) > request.num_prompt_tokens:
            return
        wanted = sampling.prompt_logprobs or 0
        self._num_top[request.slot] = self._vocab_size if wanted == ALL else min(wanted, self._vocab_size)
        if sampling.prompt_logprob_token_ids is not None:
            rows, start = sampling.prompt_logprob_token_ids, sampling.prompt_logprob_start or 0
            self._named[request.slot] = _named_ids(rows, start, request.num_prompt_tokens - 1)

    def release(self, slots: list[int]) -> None:
        """Drops the requests in these slots, whose prompts may not be scored yet."""
        if self._num_top:
            for slot in slots:
                self._num_top.pop(slot, None)
                self._named.pop(slot, None)

    def launch(self, rows: Sequence[HeadRow], table: TokenTable) -> list[PendingOutput]:
        """Computes the scores of rows that computed a part of such a prompt."""
        return [self._score(row, table) for row in rows]

    def _score(self, row: HeadRow, table: TokenTable) -> ScoredPart:
        slot, start = row.slot, row.start
        last = int(table.num_prompt_tokens[slot]) - 1  # this token has no successor in the prompt
        end = min(row.end, last)
        targets = table.token_ids[slot, start + 1 : end + 1].long()
        named = self._named.get(slot, _NO_IDS.expand(last, 0))[start:end].to(targets.device)
        num_top = self._num_top[slot]
        slices = [
            self._transfers.to_host(self._scores(logits, chunk, ids, num_top))
            for logits, chunk, ids in self._slices(row.hidden[: end - start], row.first, targets, named)
        ]
        if row.end > last:
            self.release([slot])
        return ScoredPart(row.row, start + 1, num_top + named.shape[1], slices)

    def _slices(
        self,
        hidden: torch.Tensor,
        first: int,
        targets: torch.Tensor,
        named: torch.Tensor,
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        size = max(1, _MAX_LOGITS // self._vocab_size)
        for part, chunk, ids in zip(hidden.split(size), targets.split(size), named.split(size), strict=True):
            yield self._compute_logits(part, first).float(), chunk, ids
            first += len(part)

    def _scores(
        self, logits: torch.Tensor, targets: torch.Tensor, named: torch.Tensor, num_top: int
    ) -> list[torch.Tensor]:
        """The tensors of a `ScoredPart`'s slice."""
        values = scores(logits, self._mode)
        own_ids = targets.unsqueeze(1)
        own = values.gather(1, own_ids)
        nth_likeliest = (values > own).sum(-1) + 1
        top, top_ids = likeliest(values, num_top)
        of_named = values.gather(1, named.clamp(min=0)).masked_fill(named < 0, -torch.inf)
        return [torch.cat([own_ids, top_ids, named], 1), torch.cat([own, top, of_named], 1), nth_likeliest]


def _named_ids(rows: list[list[int]], start: int, num_scored: int) -> torch.Tensor:
    """Returns [num_scored, longest row] int64: the ids that a request named for each scored position, -1 for none.

    Args:
        start: the position of the first row.
    """
    ids = torch.full((num_scored, max(map(len, rows))), -1)
    for row, named in zip(ids[start:], rows, strict=True):
        row[: len(named)] = torch.tensor(named)
    return ids
