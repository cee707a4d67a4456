"""Suffix decoding (arXiv:2411.04975): what mostly followed the newest tokens, in the request and in finished answers.

The longer the text that is the same, the more drafts: `max_spec_factor` for each of its tokens. A draft is made while
its probability, by the counts of what followed, is at least `min_token_prob`.
"""

import numpy as np

from quire.core.config.resolved import EngineConfig
from quire.core.config.speculative import Speculation
from quire.core.wire.protocol import NewSlot
from quire.executor.models.base import Model
from quire.executor.step.drafting.method import MethodParts
from quire.executor.step.drafting.token_history import TokenHistory
from quire.executor.step.drafts import Proposal
from quire.executor.step.request_table import RequestTable
from quire.executor.step.speculator import ForwardPass, ForwardReads, SampledTokens
from quire.executor.transfers import to_device

CAPACITY = 1 << 20
"""Tokens of finished answers that are kept: 17 MiB."""
_MOST_PLACES = 64


class Suffix:
    """Reads the known tokens, so that on an accelerator the launch waits for the step. All ranks keep the same."""

    reads = ForwardReads()
    sees_all_steps = False

    def __init__(self, options: Speculation, table: RequestTable) -> None:
        self._options = options
        self._table = table
        self._history = TokenHistory(CAPACITY, options.max_cached_requests)
        self._starts: dict[int, int] = {}  # by slot; from where on the history lacks its output
        self._num_known: dict[int, int] = {}  # by slot, at the last proposal

    @classmethod
    def reads_of(cls, config: EngineConfig) -> ForwardReads:
        return cls.reads

    @classmethod
    def check(cls, config: EngineConfig, target: Model, draft: Model | None) -> None:
        """Refuses nothing."""

    @classmethod
    def build(cls, parts: MethodParts) -> "Suffix":
        return cls(parts.speculation, parts.table)

    def admit(self, request: NewSlot) -> None:
        self._starts[request.slot] = self._num_known[request.slot] = len(request.token_ids)

    def release(self, slots: list[int]) -> None:
        """Keeps what the requests in these slots have put out, as far as it was seen."""
        for slot in slots:
            start, end = self._starts.pop(slot, 0), self._num_known.pop(slot, 0)
            if end > start:
                self._history.add(self._known(slot, end)[start:])

    def propose(self, forward: ForwardPass, sampled: SampledTokens, table: RequestTable) -> Proposal:
        asked = np.flatnonzero(sampled.wants_drafts)
        if not len(asked):
            return Proposal.none(table.device)
        num_known = sampled.num_known.tolist()
        self._num_known |= zip(sampled.slots.tolist(), num_known, strict=True)
        most = sampled.limit(self._options.num_tokens)
        token_ids = np.zeros((len(asked), most), np.int64)
        counts = np.zeros(len(asked), np.int64)
        for index, row in enumerate(asked.tolist()):
            slot = int(sampled.slots[row])
            if table.num_unnamed[slot]:
                continue  # tokens that are given as embeddings have no ids
            drafts = self._draft(self._known(slot, num_known[row]), most)
            token_ids[index, : len(drafts)] = drafts
            counts[index] = len(drafts)
        return Proposal(to_device(token_ids, table.device), to_device(counts, table.device))

    def _known(self, slot: int, num_known: int) -> np.ndarray:
        known: np.ndarray = self._table.token_ids[slot, :num_known].cpu().numpy().astype(np.int64)
        return known

    def _draft(self, known: np.ndarray, most: int) -> list[int]:
        """Returns the better of what followed in the request itself and in finished answers."""
        depth = self._options.max_tree_depth
        places, lengths = _find_within(known, depth)
        own = self._vote(_following(known, places, most), lengths, most)
        places, lengths = self._history.find(known, depth)
        others = self._vote(self._history.following(places, most), lengths, most)
        return max((own, others), key=lambda each: each[1])[0]

    def _vote(self, following: np.ndarray, lengths: np.ndarray, most: int) -> tuple[list[int], float]:
        """Returns the drafts that most places agree on, and how many of them are expected to be right.

        Args:
            following: [k, most] int64; what followed each place, -1 past its end.
            lengths: [k] int64; of the text before, that is the same. Only the longest count.
        """
        if not len(lengths):
            return [], 0.0
        length = int(lengths.max())
        rows = following[lengths == length]
        options = self._options
        limit = min(most, options.max_tree_depth - 1, int(options.max_spec_factor * length))
        drafts: list[int] = []
        probability, expected, num_places = 1.0, 0.0, len(rows)
        for place in range(limit):
            column = rows[:, place]
            values, numbers = np.unique(column[column >= 0], return_counts=True)
            if not len(values):
                break
            best = int(numbers.argmax())
            probability = numbers[best] / num_places
            if probability < options.min_token_prob:
                break
            drafts.append(int(values[best]))
            expected += probability
            rows = rows[column == values[best]]
        return drafts, expected


def _find_within(known: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """As `TokenHistory.find`, in the request's own tokens."""
    if len(known) < 3:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    ends = 1 + np.flatnonzero((known[1:-1] == known[-1]) & (known[:-2] == known[-2]))[-_MOST_PLACES:]
    back = np.arange(min(longest, len(known)))
    index = ends[:, None] - back
    is_same = (known[np.maximum(index, 0)] == known[len(known) - 1 - back]) & (index >= 0)
    return ends + 1, is_same.cumprod(1).sum(1)


def _following(known: np.ndarray, places: np.ndarray, num_tokens: int) -> np.ndarray:
    index = places[:, None] + np.arange(num_tokens)
    return np.where(index < len(known), known[np.minimum(index, len(known) - 1)], -1)
