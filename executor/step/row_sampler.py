"""Samples the new tokens of each row of a step, and proposes drafts for the tokens after them."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.core.wire.protocol import StepResult
from quire.core.wire.row_outputs import RequestFailure, TokenLogprobs
from quire.executor.sampling.grammar.masks import DeadEnd
from quire.executor.sampling.sampler import Sampled, Sampler
from quire.executor.sampling.sampling_feature import SampleBatch
from quire.executor.step.drafting.drafter import Drafter
from quire.executor.step.drafts import Proposal, num_accepted
from quire.executor.step.request_table import RequestTable
from quire.executor.step.short_memory import NO_MEMORY
from quire.executor.step.speculator import ForwardPass, SampledTokens
from quire.executor.transfers import Transfer, Transfers, to_device

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SampledRows:
    """The tokens of one step's rows, between launch and result.

    Attributes:
        num_wanted: [num_rows] int64, on the host; positions of each row that wants any.
        of_plan: [rows of the plan] int64, on the host; the same, and 0 for rows that want none.
        sampled: the tokens at these positions, row after row.
        counts: a transfer of two tensors like `num_wanted`: the new tokens of each row, and its current drafts. None if
            all rows have one new token and none has drafts. A third one, if the result tells the drafts themselves: [
            num_rows, most drafts] int64.
    """

    num_wanted: np.ndarray
    of_plan: np.ndarray
    sampled: Sampled
    counts: Transfer | None

    @property
    def firsts(self) -> np.ndarray:
        """The index of each row's first position among all that are sampled, [num_rows] int64."""
        return np.cumsum(self.num_wanted) - self.num_wanted

    def num_tokens(self) -> np.ndarray:
        """Returns the new tokens of each row of the plan, [rows of the plan] int64; waits for the step."""
        counts = np.zeros(len(self.of_plan), np.int64)
        counts[self.of_plan > 0] = 1 if self.counts is None else self.counts.values()[0].numpy()
        return counts

    def row(self, index: int) -> int:
        """Returns the plan's row of the sampled row with this index."""
        return int(np.flatnonzero(self.of_plan)[index])


class RowSampler:
    """Samples a step's wanted positions and groups the tokens by row.

    Args:
        drafter: proposes drafts; None: no drafts.
        release: returns to the device the memory that nothing uses; None: a step without enough memory ends the engine.
        tells_drafts: results have the drafts themselves, for other stages.
    """

    def __init__(
        self,
        sampler: Sampler,
        table: RequestTable,
        transfers: Transfers,
        drafter: Drafter | None,
        release: Callable[[], None] | None = None,
        *,
        tells_drafts: bool = False,
    ) -> None:
        self._sampler = sampler
        self._table = table
        self._transfers = transfers
        self._drafter = drafter
        self._release = release
        self._tells_drafts = tells_drafts

    def launch(self, forward: ForwardPass, compute_again: Callable[[], Tensor]) -> SampledRows | None:
        """Samples from the step's logits, and writes tokens and drafts into the table; None if no row wants a token.

        `compute_again` returns the step's logits as they were, if sampling has changed some and needs them again.
        """
        batch = forward.batch
        if not len(batch.wanted_slots):
            if self._drafter is not None and self._drafter.sees_all_steps:
                nothing = np.empty(0, np.int64)
                sampled_nothing = SampledTokens(
                    nothing, nothing, to_device(nothing, self._table.device), nothing.astype(bool)
                )
                self._proposal(self._drafter, forward, sampled_nothing)
            return None
        sampled = self._sample(forward, compute_again)
        of_plan = np.asarray(forward.plan.num_wanted, np.int64)
        num_wanted = of_plan[of_plan > 0]
        drafter = self._drafter if self._drafter is not None and self._drafter.acts_in(forward.plan) else None
        if drafter is None and len(num_wanted) == len(batch.wanted_slots):
            return SampledRows(num_wanted, of_plan, sampled, None)
        num_tokens = num_accepted(sampled, batch, of_plan, on_host=self._transfers.are_free)
        num_drafts = torch.zeros_like(num_tokens)
        drafts = None if drafter is None else self._propose(drafter, forward, num_tokens, num_drafts)
        counts = self._transfers.to_host([num_tokens, num_drafts, *([] if drafts is None else [drafts])])
        return SampledRows(num_wanted, of_plan, sampled, counts)

    def _sample(self, forward: ForwardPass, compute_again: Callable[[], Tensor]) -> Sampled:
        """Returns the tokens of all wanted positions, which the table then has."""
        batch = forward.batch
        # Copies: a logits processor may hold the arrays, and the next step may overwrite them.
        slots = batch.wanted_slots.copy()
        if forward.tokens is not None:
            token_ids, usable, scores = forward.tokens
            return self._sampler.take((token_ids, usable), slots, scores)
        samples = SampleBatch(slots, batch.wanted_positions.copy(), self._table)
        sampled = self._attempt(forward.logits, samples)
        if sampled is None:
            assert self._release is not None
            self._release()  # not before: the error holds the memory of the attempt
            sampled = self._sampler.sample_in_parts(compute_again(), samples, self._release)
            logger.warning(
                "a step was sampled in parts, because the device has little memory left; %d rows of logits failed",
                len(sampled.without_memory),
            )
        # On the device, so that the next step can read the tokens before the host does.
        self._table.write(batch.wanted_slots, batch.wanted_positions, sampled.token_ids, batch.wanted_places)
        return sampled

    def _attempt(self, logits: Tensor, samples: SampleBatch) -> Sampled | None:
        """The tokens of all rows, or None if the memory does not suffice."""
        try:
            if self._drafter is not None and self._drafter.reads.logits:
                logits = logits.clone()
            return self._sampler.sample(logits, samples)
        except torch.OutOfMemoryError:
            if self._release is None:
                raise
        return None

    def _proposal(self, drafter: Drafter, forward: ForwardPass, sampled: SampledTokens) -> Proposal | None:
        """The drafts of a step, or None if the memory for them does not suffice: requests go on without drafts.

        A draft model then lacks keys of the step's tokens, so later drafts may be worse. Outputs are the same.
        """
        try:
            return drafter.propose(forward, sampled, self._table)
        except torch.OutOfMemoryError:
            if self._release is None:
                raise
        self._release()
        logger.warning("a step has no drafts, because the device has little memory left")
        return None

    def _propose(self, drafter: Drafter, forward: ForwardPass, num_tokens: Tensor, num_drafts: Tensor) -> Tensor | None:
        """Writes drafts after the new tokens of each row, `num_tokens` [num_rows], and counts them.

        Returns them, [num_rows, most drafts] int64, for a result that tells them; else None.
        """
        batch = forward.batch
        num_wanted = np.asarray(forward.plan.num_wanted, np.int64)
        rows = np.flatnonzero(num_wanted)
        firsts = np.cumsum(num_wanted[rows]) - num_wanted[rows]
        slots = batch.wanted_slots[firsts]
        num_known = _sum(batch.wanted_positions[firsts], num_tokens)
        wants_drafts, limits = self._sampler.can_go_back(slots), None
        if forward.plan.draft_limits is not None:
            limits = np.zeros(len(rows), np.int64)
            limits[: len(forward.plan.draft_limits)] = forward.plan.draft_limits
            wants_drafts = wants_drafts & (limits > 0)
        sampled = SampledTokens(rows, slots, num_known, wants_drafts, limits)
        proposal = self._proposal(drafter, forward, sampled)
        asked = np.flatnonzero(wants_drafts)
        if proposal is None or not len(asked):
            return None
        num_columns = int(batch.wanted_positions.max()) + 1 + proposal.token_ids.shape[1]
        starts, counts = _taken(num_known, asked), proposal.num_drafts
        self._table.write_drafts(slots[asked], starts, proposal.token_ids, num_columns)
        if limits is not None:
            counts = _at_most(counts, limits[asked])
        _put(num_drafts, asked, counts)
        if not self._tells_drafts:
            return None
        drafts = proposal.token_ids.new_zeros(len(rows), proposal.token_ids.shape[1])
        _put(drafts, asked, proposal.token_ids)
        return drafts

    def collect(self, rows: SampledRows, result: StepResult) -> None:
        """Reads the rows' tokens into `result`, waiting for the step if necessary."""
        sampled, firsts = rows.sampled, rows.firsts.tolist()
        self._sampler.collect(sampled)
        token_ids, usable = sampled.on_host
        if rows.counts is None:
            result.token_ids = [[token_id] for token_id in token_ids]
        else:
            num_tokens, num_drafts, *told = (counts.tolist() for counts in rows.counts.values())
            result.token_ids = [
                token_ids[first : first + count] for first, count in zip(firsts, num_tokens, strict=True)
            ]
            if any(num_drafts):
                result.num_drafts = num_drafts
                result.drafts = [ids[:count] for each in told for ids, count in zip(each, num_drafts, strict=True)]
        if sampled.logprobs is not None:
            result.logprobs = self._logprobs(rows, result.token_ids)
        if not all(usable):
            self._blame(rows, [index for index, first in enumerate(firsts) if not usable[first]], result)
        for place in sampled.forbidden:  # such requests get no drafts: the place is its row's first
            message = "A logits processor brought back a token that the grammar forbids."
            result.outputs.append((rows.row(firsts.index(place)), RequestFailure("dead_end", message)))

    @staticmethod
    def _logprobs(rows: SampledRows, tokens: list[list[int]]) -> list[tuple[int, list[TokenLogprobs]]]:
        """Returns log-probabilities of each row that asked, for its new tokens that could be chosen."""
        sampled, firsts = rows.sampled, rows.firsts
        assert sampled.logprobs is not None
        _, usable = sampled.on_host
        found: dict[int, list[TokenLogprobs]] = {}
        for place, entry in sampled.logprobs.rows():
            row = int(np.searchsorted(firsts, place, side="right")) - 1
            if usable[place] and place - firsts[row] < len(tokens[row]):
                found.setdefault(row, []).append(entry)
        return list(found.items())

    def _blame(self, rows: SampledRows, unusable: list[int], result: StepResult) -> None:
        """Records in `result` why some of the sampled rows, by index among them, have no token."""
        for index in unusable:
            if int(rows.firsts[index]) in rows.sampled.without_memory:
                result.outputs.append((rows.row(index), NO_MEMORY))
                continue
            match self._sampler.why_unusable(rows.sampled, int(rows.firsts[index])):
                case None:
                    message = "The model's logits were NaN or infinite for this request."
                    failure = RequestFailure("internal", message, may_pass=True)
                case DeadEnd(message):
                    failure = RequestFailure("dead_end", message)
                case str(message):
                    failure = RequestFailure("invalid", message)
            result.outputs.append((rows.row(index), failure))


# Arithmetic between arrays of the host and values of the device. Where that is the host, NumPy alone computes: with
# cold caches, the first call of torch in a step takes as long as all the rest of a proposal.


def _sum(array: np.ndarray, there: Tensor) -> Tensor:
    if there.device.type == "cpu":
        return torch.from_numpy(array + there.numpy())
    return to_device(array, there.device) + there


def _taken(there: Tensor, index: np.ndarray) -> Tensor:
    if there.device.type == "cpu":
        return torch.from_numpy(there.numpy()[index])
    return there[to_device(index, there.device)]


def _at_most(there: Tensor, limits: np.ndarray) -> Tensor:
    if there.device.type == "cpu":
        return torch.from_numpy(np.minimum(there.numpy(), limits))
    return torch.minimum(there, to_device(limits, there.device))


def _put(there: Tensor, index: np.ndarray, values: Tensor) -> None:
    if there.device.type == "cpu":
        there.numpy()[index] = values.numpy()
    else:
        there[to_device(index, there.device)] = values
