"""N-grams: what followed the newest tokens of a request when they last stood in its prompt or output.

The longest n-gram that occurred before decides, and of equal ones the earliest, which has the most tokens after it.
It is searched for on the device, so no step waits for its tokens. Prompt lookup decoding, without a model.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from quire.core.config.resolved import EngineConfig
from quire.executor.models.base import Model
from quire.executor.step.drafting.method import MethodParts
from quire.executor.step.drafts import Proposal
from quire.executor.step.request_table import RequestTable
from quire.executor.step.speculator import ForwardPass, ForwardReads, SampledTokens, Stateless
from quire.executor.transfers import to_device


class Ngram(Stateless):
    """Args:
    shortest, longest: tokens of an n-gram.
    num_drafts: tokens proposed for a row, at most.
    """

    def __init__(self, shortest: int, longest: int, num_drafts: int) -> None:
        self._shortest = shortest
        self._longest = longest
        self._num_drafts = num_drafts

    @classmethod
    def reads_of(cls, config: EngineConfig) -> ForwardReads:
        return ForwardReads()

    @classmethod
    def check(cls, config: EngineConfig, target: Model, draft: Model | None) -> None:
        """Refuses nothing."""

    @classmethod
    def build(cls, parts: MethodParts) -> "Ngram":
        options = parts.speculation
        return cls(options.prompt_lookup_min, options.prompt_lookup_max, options.num_tokens)

    def propose(self, forward: ForwardPass, sampled: SampledTokens, table: RequestTable) -> Proposal:
        slots = sampled.slots[sampled.wants_drafts]
        if not len(slots):
            return Proposal.none(table.device)
        index = to_device(sampled.wants_drafts.nonzero()[0], table.device)
        num_known = sampled.num_known[index]
        num_columns = int(forward.batch.wanted_positions.max()) + 1  # no row knows more tokens
        table.reach(num_columns)
        tokens = table.token_ids[to_device(slots, table.device), :num_columns]
        named = to_device(table.num_unnamed[slots] == 0, table.device)
        return continue_ngrams(tokens, num_known, named, self._shortest, self._longest, self._num_drafts)


def continue_ngrams(
    tokens: Tensor, num_known: Tensor, is_asked: Tensor, shortest: int, longest: int, num_drafts: int
) -> Proposal:
    """Returns the continuations of the n-grams at the ends of rows.

    Args:
        tokens: [num_rows, columns] int32; those from `num_known` [num_rows] int64 on are arbitrary.
        is_asked: [num_rows] bool; others get no drafts.
    """
    num_columns = tokens.shape[1]
    places = torch.arange(num_columns, device=tokens.device)
    lengths = torch.zeros(tokens.shape, dtype=torch.int64, device=tokens.device)  # of the n-grams that end at places
    is_same = places < num_known.unsqueeze(1) - 1
    for back in range(min(longest, num_columns)):
        place = (num_known - 1 - back).unsqueeze(1)
        newest = tokens.gather(1, place.clamp(min=0))
        before = tokens if not back else pad(tokens[:, :-back], (back, 0), value=-1)
        is_same = is_same & (before == newest) & (place >= 0)
        lengths += is_same
    best, end = (lengths * num_columns + (num_columns - 1 - places)).max(1)
    start = end + 1
    counts = torch.where(is_asked & (best // num_columns >= shortest), (num_known - start).clamp(0, num_drafts), 0)
    followers = start.unsqueeze(1) + torch.arange(num_drafts, device=tokens.device)
    return Proposal(tokens.gather(1, followers.clamp(max=num_columns - 1)).long(), counts)
