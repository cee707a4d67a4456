"""Runs a step in parts, where its device has too little memory left for the whole, perhaps because another process took
some.

A part that does not fit is halved, by tokens: a request's tokens may be computed one after another, because their keys
and values stay in the pages. A single token that does not fit fails its request. All others go on.

States of recurrent layers have no positions, and the step that failed may have changed them. So such a request is
computed again from its first token on.
"""

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quire.core.wire.protocol import StepPlan
from quire.core.wire.row_outputs import RequestFailure
from quire.executor.step.forward import Forward
from quire.executor.step.input_batch import InputBatch, build_input_batch
from quire.executor.step.request_table import RequestTable

logger = logging.getLogger(__name__)

NO_MEMORY = RequestFailure(
    "internal",
    "The device has no memory left for this request. Free memory there, or lower --gpu-memory-utilization or "
    "--max-num-batched-tokens.",
)


class _Span(NamedTuple):
    """Consecutive tokens of a row. `start` counts from the first one that the plan has of the row; less: before it."""

    row: int
    start: int
    num_tokens: int


class PartedStep(NamedTuple):
    """What a step in parts computed.

    Attributes:
        values: in the order of the whole step's; NaN for rows without memory.
        failed: rows of the plan.
    """

    values: Tensor
    failed: set[int]


class StepInParts:
    """Computes steps of one rank in parts.

    Args:
        vocab_size: logits of a token.
        hidden_size: hidden states of a token.
        has_states: the model has recurrent layers.
        can_restart: pages of all tokens of a row are held, so that they may be computed again.
        can_cut: a row's tokens may be computed one after another. Tokens that see later ones are computed together.
    """

    def __init__(
        self,
        forward: Forward,
        table: RequestTable,
        vocab_size: int,
        hidden_size: int,
        *,
        has_states: bool,
        can_restart: bool,
        can_cut: bool,
    ) -> None:
        self._forward = forward
        self._table = table
        self._vocab_size = vocab_size
        self._hidden_size = hidden_size
        self._has_states = has_states
        self._can_restart = can_restart
        self._can_cut = can_cut

    def logits(self, plan: StepPlan, *, is_plain: bool) -> PartedStep:
        """Computes the logits of all wanted tokens, [num_wanted, vocab_size].

        If not `is_plain`, the step has further inputs, which parts lack: all rows fail. So in `hidden`.
        """
        return self._compute(plan, self._forward.logits, self._vocab_size, plan.num_wanted, is_plain)

    def hidden(self, plan: StepPlan, *, is_plain: bool) -> PartedStep:
        """Computes the hidden states of all tokens, [num_tokens, hidden_size]."""
        return self._compute(plan, self._forward.hidden, self._hidden_size, plan.num_scheduled, is_plain)

    def _compute(
        self, plan: StepPlan, run: Callable[[InputBatch], Tensor], size: int, counts: Sequence[int], is_plain: bool
    ) -> PartedStep:
        """Runs a step. A row has a value for each of its last `counts[row]` tokens."""
        found: list[list[Tensor]] = [[] for _ in plan.slots]
        failed: set[int] = set()
        waiting = [[_Span(row, 0, count) for row, count in enumerate(plan.num_scheduled)]]
        if not is_plain or (self._has_states and not self._can_restart):
            failed, waiting = set(range(len(plan.slots))), []
        elif self._has_states:
            found, failed = self._compute_again(plan, run, counts)
            waiting = []
        while waiting:
            part = [span for span in waiting.pop() if span.row not in failed]
            if not part:
                continue
            wanted = [_num_wanted(span, plan.num_scheduled[span.row], counts[span.row]) for span in part]
            values = self._attempt(plan, part, wanted, run)
            if values is None:
                halves = _halve(part, can_cut=self._can_cut)
                failed.update(() if halves else {part[0].row})
                waiting += reversed(halves)
                continue
            for span, own in zip(part, values.split(wanted), strict=True):
                if len(own):
                    found[span.row].append(own)
        logger.warning(
            "a step ran in parts, because the device has little memory left; %d requests failed", len(failed)
        )
        return PartedStep(self._join(found, failed, size, counts), failed)

    def _compute_again(
        self, plan: StepPlan, run: Callable[[InputBatch], Tensor], counts: Sequence[int]
    ) -> tuple[list[list[Tensor]], set[int]]:
        """Computes rows one after another from their first tokens on: their values, and the rows without memory."""
        most = max(1, sum(plan.num_scheduled) // 2)
        found: list[list[Tensor]] = []
        failed: set[int] = set()
        for row, count in enumerate(counts):
            size = most
            own = self._restart(plan, run, row, count, size)
            while own is None and size > 1:
                size //= 2
                own = self._restart(plan, run, row, count, size)
            found.append(own or [])
            if own is None:
                failed.add(row)
            else:
                most = size
        return found, failed

    def _restart(
        self, plan: StepPlan, run: Callable[[InputBatch], Tensor], row: int, count: int, most: int
    ) -> list[Tensor] | None:
        """The values of a row, computed from its first token on, `most` tokens at a time; None without memory."""
        computed, end, values = plan.num_computed[row], plan.num_scheduled[row], []
        for start in (*range(-computed, 0, most), *range(0, end, most)):
            span = _Span(row, start, min(most, (0 if start < 0 else end) - start))
            wanted = _num_wanted(span, end, count)
            own = self._attempt(plan, [span], [wanted], run)
            if own is None:
                return None
            values += [own] if wanted else []
        return values

    def _attempt(
        self, plan: StepPlan, part: list[_Span], wanted: list[int], run: Callable[[InputBatch], Tensor]
    ) -> Tensor | None:
        """The values of a part, or None if the memory does not suffice."""
        columns = (
            [plan.slots[span.row] for span in part],
            [plan.num_computed[span.row] + span.start for span in part],
            [span.num_tokens for span in part],
        )
        step = StepPlan(plan.step_id, [], [], *columns, wanted, [])
        try:
            values = run(build_input_batch(step, self._table, has_states=self._has_states))
            return values[: sum(wanted)]
        except torch.OutOfMemoryError:
            pass  # the error holds the memory of the part, so it is let go first
        self.release()
        return None

    def release(self) -> None:
        """Returns memory to the device that torch keeps and nothing uses."""
        if self._table.device.type == "cuda":
            torch.cuda.empty_cache()

    def _join(self, found: list[list[Tensor]], failed: set[int], size: int, counts: Sequence[int]) -> Tensor:
        """Puts the rows' values together."""
        like = next((own for row in found for own in row), None)
        for row in failed:
            missing = torch.full((counts[row], size), torch.nan, device=self._table.device)
            found[row] = [missing if like is None else missing.to(like.dtype)]
        values = [own for row in found for own in row if len(own)]
        return torch.cat(values) if values else torch.empty(0, size, device=self._table.device)


def _num_wanted(span: _Span, num_tokens: int, count: int) -> int:
    """Counts the tokens of a span that are among the last `count` of its row's `num_tokens`."""
    end = span.start + span.num_tokens
    return max(0, end - max(span.start, num_tokens - count))


def _halve(part: list[_Span], *, can_cut: bool = True) -> list[list[_Span]]:
    """Cuts a part in two with equally many tokens, or rows; empty for a single one."""
    if not can_cut:
        middle = len(part) // 2
        return [part[:middle], part[middle:]] if middle else []
    rest = sum(span.num_tokens for span in part) // 2
    if not rest:
        return []
    first: list[_Span] = []
    second: list[_Span] = []
    for span in part:
        count = min(span.num_tokens, rest)
        rest -= count
        if count:
            first.append(span._replace(num_tokens=count))
        if count < span.num_tokens:
            second.append(_Span(span.row, span.start + count, span.num_tokens - count))
    return [first, second]
