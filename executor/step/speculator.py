"""The interface of a speculator: sees each step's forward pass, and proposes drafts after the tokens it sampled."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from quire.core.wire.protocol import NewSlot, StepPlan
from quire.executor.sampling.recorded_sampler import ChosenTokens
from quire.executor.step.drafts import Proposal
from quire.executor.step.input_batch import InputBatch
from quire.executor.step.request_table import RequestTable
from quire.executor.step.slot_state import SlotState


class ForwardReads(NamedTuple):
    """The results of a forward pass that a speculator reads. Others may not be computed, or not be kept.

    Attributes:
        hidden: the last hidden states of all tokens; steps are then run without recordings.
        layers: indices of layers whose outputs are read, for all tokens; implies `hidden`.
        logits: as the model computes them, before the sampler changes them.
    """

    hidden: bool = False
    layers: tuple[int, ...] = ()
    logits: bool = False

    @property
    def needs_hidden(self) -> bool:
        """True if the model has to compute the hidden states of all tokens."""
        return self.hidden or bool(self.layers)


class ForwardPass(NamedTuple):
    """One step's forward pass; values are on the device, and valid until the next step.

    Attributes:
        plan: the step's plan: slots and positions of each row.
        batch: the model's input: tokens, positions, and their places in the pages of each KV group.
        logits: [num_wanted, vocab_size]; the sampler may have changed them, unless the speculator reads them.
        hidden: [num_tokens, hidden], if they are read.
        layers: by index, the output of a layer with the residual stream, [num_tokens, hidden], if it is read.
        tokens: those that the pass itself has chosen, see `StepOutput`.
    """

    plan: StepPlan
    batch: InputBatch
    logits: Tensor
    hidden: Tensor | None = None
    layers: Mapping[int, Tensor] = {}
    tokens: ChosenTokens | None = None


class SampledTokens(NamedTuple):
    """The rows of a step that have new tokens, which are in the request table already.

    Attributes:
        rows: [num_rows] int64, on the host; the rows of the plan.
        slots: [num_rows] int64, on the host.
        num_known: [num_rows] int64, on the device; the known tokens of each request, new ones included.
        wants_drafts: [num_rows] bool, on the host.
        limits: [num_rows] int64, on the host; the most drafts of a row that will be checked. None: there is no limit.
    """

    rows: np.ndarray
    slots: np.ndarray
    num_known: Tensor
    wants_drafts: np.ndarray
    limits: np.ndarray | None = None

    def limit(self, most: int) -> int:
        """Returns `most`, or less if no row that wants drafts may have as many."""
        if self.limits is None:
            return most
        return min(most, int(self.limits[self.wants_drafts].max(initial=0)))


class Speculator(SlotState, Protocol):
    """Proposes the next tokens of requests. All ranks must propose the same drafts.

    One that `sees_all_steps` is called once in every step, also where no row samples: a speculator with keys and values
    of its own computes them for all tokens of the step, so that cached prefixes are complete. Others are called where a
    row wants drafts.

    Requests whose features cannot go back (`SamplingFeature.can_go_back`) get no drafts.

    Attributes:
        reads: what `propose` reads of the forward pass.
        sees_all_steps: it keeps something of every token.
    """

    reads: ForwardReads
    sees_all_steps: bool

    def propose(self, forward: ForwardPass, sampled: SampledTokens, table: RequestTable) -> Proposal:
        """Returns drafts for the positions from `num_known` on, one row for each that wants drafts, in order.

        Called while the step's launch is under way. An implementation that reads from the device makes the launch wait
        for the step.
        """
        ...


class Stateless:
    """A base for speculators that keep nothing of requests, and read nothing of the forward pass."""

    reads = ForwardReads()
    sees_all_steps = False

    def admit(self, request: NewSlot) -> None:
        """Does nothing."""

    def release(self, slots: list[int]) -> None:
        """Does nothing."""
