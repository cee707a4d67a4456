"""The places of a step's tokens whose successors are known, with what the target made of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
import torch
from torch import Tensor

from quire.core.config.resolved import EngineConfig
from quire.core.wire.protocol import StepPlan
from quire.executor.sampling.sampler import Sampler
from quire.executor.sampling.sampling_feature import SampleBatch
from quire.executor.step.drafting.method import MethodParts
from quire.executor.step.request_table import RequestTable
from quire.executor.step.speculator import ForwardPass, ForwardReads, SampledTokens
from quire.executor.transfers import to_device


@dataclass(frozen=True)
class TargetPairs:
    """The rows of a step, on the host.

    Attributes:
        slots: [num_rows] int64.
        starts: [num_rows] int64; the first position that the step has computed.
        counts: [num_rows] int64; computed tokens that are known, and whose successors are.
        num_known: [num_rows] int64; known tokens with those that the step has sampled, or up to the last computed one.
        asked: [num_asked] int64; the rows that want drafts.
        limits: [num_asked] int64; the most drafts of these that will be checked. None: there is no limit.
    """

    slots: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    num_known: np.ndarray
    asked: np.ndarray
    limits: np.ndarray | None

    @classmethod
    def of(cls, plan: StepPlan, sampled: SampledTokens) -> "TargetPairs":
        """Reads the number of accepted tokens, and so waits for the step."""
        slots, starts = np.asarray(plan.slots, np.int64), np.asarray(plan.num_computed, np.int64)
        counts = np.array(plan.num_scheduled, np.int64)
        num_known = starts + counts
        num_known[sampled.rows] = sampled.num_known.tolist()
        counts[sampled.rows] = num_known[sampled.rows] - 1 - starts[sampled.rows]  # the newest has no successor
        limits = None if sampled.limits is None else sampled.limits[sampled.wants_drafts]
        return cls(slots, starts, counts, num_known, sampled.rows[sampled.wants_drafts], limits)

    def fits(self, table: RequestTable, max_positions: int) -> np.ndarray:
        """Returns the rows that can be computed, [num_rows] bool: tokens that are given as embeddings have no ids, and
        positions may end before the target's.
        """
        return (table.num_unnamed[self.slots] == 0) & (self.num_known <= max_positions)

    def num_drafts(self, table: RequestTable, most: int, max_positions: int) -> np.ndarray:
        """Returns the drafts that each row that wants some can have, [num_asked] int64."""
        room = np.minimum(most, max_positions - self.num_known)
        counts = np.where(self.fits(table, max_positions), room, 0)[self.asked]
        return counts if self.limits is None else np.minimum(counts, self.limits)


def states_of(forward: ForwardPass, layers: Sequence[int], counts: np.ndarray) -> Tensor:
    """Returns the target's states of the first `counts` tokens of each row: [their sum, size].

    These are the outputs of `layers`, side by side, or without any the last hidden states.
    """
    states = torch.cat([forward.layers[layer] for layer in layers], 1) if layers else forward.hidden
    assert states is not None
    scheduled = np.asarray(forward.plan.num_scheduled, np.int64)
    if (counts == scheduled).all():
        return states
    firsts = np.cumsum(scheduled) - scheduled
    places = np.arange(counts.sum()) + np.repeat(firsts - (np.cumsum(counts) - counts), counts)
    return states[to_device(places, states.device)]


def reads_of(config: EngineConfig) -> ForwardReads:
    """Returns what is read of a forward pass for the layers that `config` names."""
    assert config.draft_model is not None
    return reads(config.draft_model.spec.hf_config["target_layers"])


class DraftOptions(TypedDict):
    """Arguments of `HeadDrafts`."""

    sampler: Sampler | None
    num_drafts: int
    vocab_size: int
    max_positions: int


def options_of(parts: MethodParts) -> DraftOptions:
    """Returns how drafts are drawn, and the numbers of drafts, of the target's tokens, and of positions."""
    assert parts.draft is not None
    lengths = (parts.max_model_len, parts.draft.spec.max_position_embeddings, parts.speculation.max_model_len)
    return {
        "sampler": None if parts.speculation.draft_sampling == "greedy" else parts.sampler,
        "num_drafts": parts.speculation.num_tokens,
        "vocab_size": parts.config.spec.vocab_size,
        "max_positions": min(length for length in lengths if length is not None),
    }


def choose(logits: Tensor, sampler: Sampler | None, samples: SampleBatch) -> Tensor:
    """Returns a draft for each row of `logits`, for the places of `samples`: [num_rows] int64.

    A `sampler` draws them as it draws tokens. Without one, they are the likeliest.
    """
    return logits.argmax(-1) if sampler is None else sampler.draft(logits, samples)


def reads(layers: Sequence[int]) -> ForwardReads:
    """Returns what is read of a forward pass for the outputs of `layers`, or without any for the last hidden states."""
    return ForwardReads(hidden=not layers, layers=tuple(layers))
