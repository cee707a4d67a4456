"""Takes in the results of steps: tokens, other outputs, failures, and the ends of requests that follow from them."""

from collections.abc import Callable, Collection

from quire.core.kv.kv_cache import KVCacheManager
from quire.core.scheduling.held import HeldRequests
from quire.core.scheduling.in_flight import StepInFlight
from quire.core.scheduling.request import Request, RequestStatus
from quire.core.scheduling.stop_conditions import StopConditions
from quire.core.scheduling.totals import Totals
from quire.core.wire.protocol import FinishReason, RequestDelta, StepResult
from quire.core.wire.row_outputs import HiddenStates, PooledVector, PromptOutput, RequestFailure


class Results:
    """Turns each step's result into deltas, and ends the requests that are done.

    Args:
        held: the requests.
        kv: has their pages.
        stop_conditions: find the ends of outputs.
        totals: count what results bring.
        max_num_drafts: of one row.
        clock: seconds, monotonic.

    Attributes:
        has_drafts: whether the workers have ever proposed drafts.
    """

    def __init__(
        self,
        held: HeldRequests,
        kv: KVCacheManager,
        stop_conditions: StopConditions,
        totals: Totals,
        *,
        max_num_drafts: int,
        clock: Callable[[], float],
    ) -> None:
        self._held = held
        self._kv = kv
        self._stop_conditions = stop_conditions
        self._totals = totals
        self._max_num_drafts = max_num_drafts
        self._clock = clock
        self.has_drafts = False

    def take(self, step: StepInFlight, result: StepResult) -> list[RequestDelta]:
        """Takes in the result of `step`; returns a delta for each of its unfinished requests."""
        num_before = len(self._held)
        self._finish_moves(result.moved)
        failed = self._take_failures(step, result)
        self._totals.add_prefilled(step)
        outputs = self._take_outputs(step, result)
        self.has_drafts = self.has_drafts or bool(result.num_drafts)
        checks_drafts = self.has_drafts and max(step.plan.num_wanted, default=0) > 1
        deltas = self._append_tokens(step.requests, result, closely=checks_drafts or bool(self._held.num_watching))
        num_tokens = len(deltas)
        if self.has_drafts:
            num_tokens = sum(len(delta.token_ids) for delta in deltas)
            self._settle_drafts(step, result)
        num_finished = num_before - len(self._held)
        self._totals.add_step(result, self._clock(), num_tokens=num_tokens, num_finished=num_finished)
        self._held.drop_finished()
        return outputs + deltas + failed

    def _finish_moves(self, move_ids: Collection[int]) -> None:
        """Queues the requests again that waited for these moves."""
        for move_id in move_ids:
            load = self._kv.finish_move(move_id)
            if load is not None:
                self._held.queue_again(load)

    def _take_failures(self, step: StepInFlight, result: StepResult) -> list[RequestDelta]:
        """Ends the requests of rows that failed."""
        return [
            self.fail(request, output)
            for row, output in result.outputs
            if isinstance(output, RequestFailure)
            and (request := step.request_of(row)).status is not RequestStatus.FINISHED
        ]

    def _take_outputs(self, step: StepInFlight, result: StepResult) -> list[RequestDelta]:
        """Takes in what rows computed besides tokens, and ends requests that want nothing else."""
        deltas: list[RequestDelta] = []
        for row, output in result.outputs:
            if isinstance(output, RequestFailure):
                continue
            request = step.request_of(row)
            if request.status is RequestStatus.FINISHED:
                continue
            if request.pooling is not None and _ends_prompt(output, request):
                self._held.end(request)
                deltas.append(request.last_delta(FinishReason.STOP, output=output))
            else:
                deltas.append(RequestDelta(request.request_id, [], output=output))
        return deltas

    def _append_tokens(self, requests: list[Request], result: StepResult, *, closely: bool) -> list[RequestDelta]:
        """Appends sampled tokens and ends sequences. This loop, too, runs once per running request and step.

        Args:
            closely: a row may bring several tokens, or a repetition end it. Else only a stop token or the length does.
        """
        deltas: list[RequestDelta] = []
        logprobs = dict(result.logprobs)
        finished = RequestStatus.FINISHED
        for index, (request, tokens) in enumerate(zip(requests, result.token_ids, strict=True)):
            if request.status is finished:
                continue  # aborted, failed, or ended by an earlier token
            output = request.output_token_ids
            output.extend(tokens)
            reason = stop_token_id = None
            if closely or tokens[0] in request.stop_ids or len(output) == request.max_num_output_tokens:
                end = self._stop_conditions.first(request, tokens)
                if end is not None:
                    reason, stop_token_id = end
                    self._held.end(request)
            deltas.append(
                RequestDelta(
                    request.request_id,
                    tokens,
                    reason,
                    stop_token_id,
                    logprobs[index][: len(tokens)] if logprobs and index in logprobs else None,
                    None,
                    request.num_cached_tokens,
                    request.queued_at,
                    request.scheduled_at,
                    request.num_preemptions,
                )
            )
        return deltas

    def _settle_drafts(self, step: StepInFlight, result: StepResult) -> None:
        """Takes back what was planned for rejected drafts, and notes the drafts that the workers have now."""
        num_wanted = filter(None, step.plan.num_wanted)
        now_held = result.num_drafts or [0] * len(step.requests)
        drafts = result.drafts or [[]] * len(step.requests)
        rows = zip(step.requests, num_wanted, result.token_ids, now_held, drafts, strict=True)
        for request, wanted, tokens, held, draft_ids in rows:
            if wanted > 1:
                request.settle_drafts()
                self._totals.add_drafts(wanted - 1, len(tokens) - 1)
            if request.status is RequestStatus.RUNNING:
                request.expect_drafts(min(held, self._max_num_drafts))
                request.draft_ids = draft_ids

    def fail(self, request: Request, failure: RequestFailure) -> RequestDelta:
        """Ends a request that failed, or whose grammar does not let it go on; without any output, that is a refusal."""
        self._held.end(request)
        if failure.kind == "dead_end":
            if request.output_token_ids:
                return request.last_delta(FinishReason.LENGTH, failure)
            failure = RequestFailure("invalid", failure.message)
        self._kv.disown(request)
        return request.last_delta(FinishReason.ERROR, failure)


def _ends_prompt(output: PromptOutput, request: Request) -> bool:
    """Returns True if `output` is the last that a request for hidden states gets."""
    match output:
        case PooledVector():
            return True
        case HiddenStates(start=start, num_tokens=num_tokens):
            return start + num_tokens == request.num_prompt_tokens
        case _:
            return False
