"""Decides which request runs next, for how many tokens, and in which pages and slots.

One rule: a request has `num_tokens` and `num_planned_tokens`, and a step gives it some of the difference. Running
requests come first, then waiting ones. When no page is left, the request that the policy puts last is preempted and
recomputed later. The scheduler owns time and memory, and never sees text or tensors.

A step computes a prefix span whole: tokens of a prompt that see each other in both directions. In some models that is
the whole prompt. After a preemption or a crash, it is the prompt that the client sent; the output tokens follow it in
chunks.

Plans are made ahead. That is correct because workers execute plans strictly in order:

- Planned tokens count as computed, and a row that samples adds a placeholder to its request's `num_tokens`.
- A row with drafts is the exception: the number of accepted tokens decides which position its request computes next.
  So that request is not planned again before the row's result is back; all others are. The result takes back the
  positions of rejected drafts, and a later plan overwrites their keys and values. When the workers begin to propose
  drafts for a request, it is not planned ahead either until the results in flight have brought its newest token: its
  drafts come after that token.
- Pages of a preempted, finished or aborted request are free at once, though steps in flight may still use them. The
  next owner writes to them in a later plan, thus after the last old reader and writer.
- A slot goes back to the stack at once too. Only a plan hands it out again, and that plan carries the release.

If lower tiers of memory have pages that a waiting request can continue from, the plan has moves that load them, and the
request waits until a result reports these. Others may overtake it meanwhile.

With several pipeline stages, the last one samples, and the first needs the tokens. So a request is not planned while
one of its tokens is being sampled, because the plan for a token contains its value, and those of the drafts after it.
The running requests are divided over one plan per stage, so that every stage has work. Chunks of prompts are planned
ahead as always.
"""

import time
from collections.abc import Callable, Collection, Iterable, Sequence

from quire.core.config.resolved import SchedulerLimits
from quire.core.config.speculative import Speculation
from quire.core.kv.block_table import CachedPrefix
from quire.core.kv.kv_cache import KVCacheManager
from quire.core.kv.page_loads import LowerTiers
from quire.core.kv.paged_request import PlannedSnapshot
from quire.core.scheduling.adapter_slots import AdapterSlots, AdapterWait
from quire.core.scheduling.admission import Admission
from quire.core.scheduling.draft_rows import DraftRows
from quire.core.scheduling.drafting import Drafting
from quire.core.scheduling.held import HeldRequests, priority_key
from quire.core.scheduling.in_flight import StepsInFlight
from quire.core.scheduling.order import FIRST, Turns, policy_of
from quire.core.scheduling.pace import Pace
from quire.core.scheduling.prefill import ChunkedPrefill, PrefillPolicy, WholePrefill
from quire.core.scheduling.request import Prompt, Request
from quire.core.scheduling.results import Results
from quire.core.scheduling.shares import giving_sequence
from quire.core.scheduling.stop_conditions import StopConditions
from quire.core.scheduling.totals import Totals
from quire.core.scheduling.tower_rows import TowerRows
from quire.core.scheduling.usable_values import UsableValues
from quire.core.wire.adapters import Adapter
from quire.core.wire.kv_groups import KVGroupSpec, keeps_nothing
from quire.core.wire.media import spans_of
from quire.core.wire.page_moves import PageMove
from quire.core.wire.prefix_spans import PrefixSpan, undivided
from quire.core.wire.protocol import (
    EngineRequest,
    FinishReason,
    RequestDelta,
    SchedulerStats,
    SequenceStart,
    StepPlan,
    StepResult,
)
from quire.core.wire.row_outputs import RequestFailure


class Scheduler:
    """Plans steps, as the module's docstring describes. `Results` takes in what comes back.

    Args:
        limits: budgets and policies.
        kv_groups: the model's KV groups; a request has a block table in each that `KVGroupSpec.has_block_table`.
        num_pages: pages in the pool, for all groups together.
        max_model_len: longest prompt plus output, tokens.
        eos_token_ids: tokens that end a sequence unless it ignores them.
        num_stages: pipeline stages that divide the layers.
        num_token_types: segments that the tokens of a prompt can be of.
        clock: seconds, monotonic.
        lower_tiers: save pages that the pool evicts; None: there are none.
        whole_prompts: each prompt is one prefix span.
        media_spans: the tokens of an image see each other.
        media_rows: rows of images and sounds that workers have room for; those of a step at least.
        speculation: how workers make drafts; None: what they propose is checked, and nothing is asked for.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        *,
        kv_groups: Sequence[KVGroupSpec],
        num_pages: int,
        max_model_len: int,
        eos_token_ids: Collection[int],
        num_stages: int = 1,
        num_token_types: int = 1,
        clock: Callable[[], float] = time.monotonic,
        lower_tiers: LowerTiers | None = None,
        whole_prompts: bool = False,
        media_spans: bool = False,
        media_rows: int = 0,
        speculation: Speculation | None = None,
    ) -> None:
        self._limits = limits
        self._stop_conditions = StopConditions(eos_token_ids)
        self._num_stages = num_stages
        self._clock = clock
        self._priority_key_of = policy_of(limits)
        self._turns = Turns(limits.max_num_seqs)
        self._prefill: PrefillPolicy = ChunkedPrefill(limits) if limits.enable_chunked_prefill else WholePrefill(limits)
        is_chunked = limits.enable_chunked_prefill and not whole_prompts
        self._pace = Pace(limits.long_prefill_slowdown if is_chunked else 0.0, limits.largest_chunk)
        self._whole_prompts = whole_prompts
        self._media_spans = media_spans
        self._towers = TowerRows(limits.max_num_batched_tokens, media_rows)
        self._kv = KVCacheManager(
            kv_groups,
            num_pages=num_pages,
            block_size=limits.block_size,
            largest_chunk=limits.largest_chunk,
            num_lookahead_tokens=limits.num_lookahead_tokens,
            enable_prefix_caching=limits.enable_prefix_caching and not whole_prompts,
            hash_algorithm=limits.prefix_caching_hash_algo,
            lower_tiers=lower_tiers,
        )
        adapters = None
        if limits.max_adapters:
            adapters = AdapterSlots(
                limits.max_adapters, limits.max_adapters_on_host, max_overtaking=limits.max_num_seqs
            )
        self._held = HeldRequests(limits.max_num_seqs, self._kv, adapters)
        self._is_divided = False  # between several tenants, at the last plan
        self._has_lower_tiers = lower_tiers is not None
        self._short_of_pages = False  # at the last plan, a request waited although slots were free
        self._prefilled: list[Request] = []  # whose prompts end in the step that is planned
        self._snapshots: list[tuple[int, PlannedSnapshot]] = []  # by slot, that the step which is planned shall take
        self._others: dict[int, Request] = {}  # by row of the plan, that want no token, or another output besides
        self._in_flight = StepsInFlight(clock)
        self._drafting = None if speculation is None else Drafting(speculation, num_stages)
        self._draft_rows = DraftRows(limits, self._kv)
        self._usable = UsableValues(eos_token_ids)
        self._num_arrivals = 0
        self._num_steps = 0
        self._num_streams = 0  # requests that the last plan samples tokens for
        self._num_left_tokens = 0  # of running requests, that the last plan left to later ones
        self._totals = Totals(clock())
        self._results = Results(
            self._held,
            self._kv,
            self._stop_conditions,
            self._totals,
            max_num_drafts=limits.largest_chunk - 1,  # a row's tokens are at most a chunk
            clock=clock,
        )
        self._admission = Admission(
            limits,
            max_model_len=max_model_len,
            kv=self._kv,
            throughput=self._totals.throughput,
            generates=not keeps_nothing(kv_groups),
            encoder_rows=next((group.encoder_rows for group in kv_groups if group.is_cross), None),
            num_token_types=num_token_types,
        )

    # ------------------------------------------------------------------------------------------- requests come and go

    def add(self, wire: EngineRequest) -> list[RequestDelta]:
        """Queues the sequences of a request. Returns the final deltas of the sequences that are refused."""
        now = self._clock()
        prompt = Prompt(wire, self._prefix_spans(wire))
        stop_ids = self._stop_conditions.stop_ids(wire.sampling)
        max_num_tokens = self._admission.max_num_tokens(wire)
        fault, overload = self._admission.fault(wire, prompt.prefix_spans), None
        refused = []
        for turn, start in zip(self._turns.take(len(wire.sequences)), wire.sequences, strict=True):
            failure = fault or overload or self._fault(wire, start)
            if failure is None and not wire.is_accepted:
                failure = overload = self._overload(now)
            if failure is not None:
                refused.append(RequestDelta(start.request_id, [], FinishReason.ERROR, failure=failure))
                continue
            request = Request(
                wire,
                start,
                prompt,
                priority_key=(*self._priority_key_of(wire, turn, now), self._num_arrivals),
                turn=turn,
                max_num_tokens=max_num_tokens,
                stop_ids=stop_ids,
                queued_at=now,
            )
            self._num_arrivals += 1
            self._held.add(request)
        return refused

    def _probe(self, wire: EngineRequest) -> None:
        """Queues a probe before all other requests, unless an earlier one has not run yet."""
        [start] = wire.sequences
        if start.request_id not in self._held.by_id:
            prompt, now = Prompt(wire, self._prefix_spans(wire)), self._clock()
            num_tokens = self._admission.max_num_tokens(wire)
            self._held.add(
                Request(
                    wire,
                    start,
                    prompt,
                    priority_key=FIRST,
                    max_num_tokens=num_tokens,
                    stop_ids=frozenset(),
                    queued_at=now,
                )
            )

    def _prefix_spans(self, wire: EngineRequest) -> list[PrefixSpan]:
        if self._whole_prompts:
            return [(0, len(wire.prompt_token_ids))]
        return spans_of(wire.media) if self._media_spans and wire.media else wire.prefix_spans

    def _fault(self, wire: EngineRequest, start: SequenceStart) -> RequestFailure | None:
        """The reason why one sequence of a request can never be served; None if it can."""
        if start.request_id in self._held.by_id:
            return RequestFailure(
                "invalid", f"A request with the id {start.request_id!r} is unfinished; ids must differ until then."
            )
        return self._admission.resume_fault(wire, start)

    def _overload(self, now: float) -> RequestFailure | None:
        # If the last plan left a request waiting for pages, free slots admit no request.
        num_free_slots = 0 if self._short_of_pages else len(self._held.free_slots)
        return self._admission.overload(
            num_waiting=self._held.num_waiting,
            num_free_slots=num_free_slots,
            num_waiting_tokens=self._held.num_new_tokens,
            num_waiting_bytes=self._held.num_waiting_bytes,
            running=self._held.running,
            now=now,
        )

    def tenant_of(self, request_id: str) -> str | None:
        """The tenant that an unfinished request belongs to; None if there is no such request."""
        request = self._held.by_id.get(request_id)
        return None if request is None else request.tenant

    def abort(self, request_ids: Iterable[str]) -> list[RequestDelta]:
        """Stops requests and frees what they hold at once; unknown and finished ids are skipped."""
        deltas = []
        for request_id in request_ids:
            request = self._held.by_id.get(request_id)
            if request is not None:
                self._held.end(request)
                deltas.append(request.last_delta(FinishReason.ABORT))
        self._held.drop_finished()
        return deltas

    def has_unfinished(self) -> bool:
        return bool(self._held)

    @property
    def num_in_flight(self) -> int:
        """Plans whose results have not come back."""
        return len(self._in_flight)

    @property
    def seconds_in_flight(self) -> float:
        """The age of the oldest plan in flight; 0 when there is none."""
        return self._in_flight.seconds

    # --------------------------------------------------------------------------------------------------------- plan

    def schedule(self) -> StepPlan | None:
        """The next step's plan, or None when nothing can run before a result comes back or a request arrives."""
        if self._drafting is not None and self._in_flight and self._drafting.waits(self._held.running):
            return None
        plan = StepPlan(self._num_steps, [], [], [], [], [], [], [])
        sampling: list[Request] = []
        self._num_left_tokens = 0
        self._towers.begin()
        self._share()
        self._pace.begin(is_beside_streams=bool(self._held.running and self._num_streams))
        budget = self._plan_running(plan, sampling, self._limits.max_num_batched_tokens)
        self._plan_waiting(plan, sampling, budget)
        if self._has_lower_tiers:
            plan.moves_before += self._kv.take_moves()
        if not plan.slots and not self._needs_plan_without_rows(plan):
            return None
        plan.released = self._held.take_released()
        plan.forgotten += self._towers.take_dropped()
        if self._snapshots:
            plan.moves_after = [each.move_from(slot) for slot, each in self._snapshots if self._kv.has_pages(each)]
            self._snapshots = []
        self._num_steps += 1
        self._num_streams = len(sampling)
        if self._drafting is not None:
            self._drafting.limit(plan, sampling, self._held.running)
        prefilled, self._prefilled = self._prefilled, []
        others, self._others = self._others, {}
        self._in_flight.add(plan, sampling, prefilled, others, self._totals.num_planned_prompt_tokens)
        return plan

    def admitted_ids(self, plan: StepPlan) -> list[str]:
        """The ids of the requests that `plan`, the newest, admits, in order."""
        if not plan.admitted:
            return []
        by_slot = {request.slot: request.request_id for request in self._held.running}
        return [by_slot.get(new.slot, "") for new in plan.admitted]

    def _share(self) -> None:
        """Takes a slot from the tenant or request that has too many, if the next one to be admitted has none, and puts
        running requests of several tenants in turns."""
        held, shares = self._held, self._held.shares
        head = None if held.free_slots and not self._short_of_pages else held.waiting.first()
        was_divided, self._is_divided = self._is_divided, shares.is_divided(held.waiting.tenants)
        if self._is_divided or was_divided:
            held.running = shares.in_turns(sorted(held.running, key=priority_key))
        if head is None:
            return
        giver = shares.giver(head, held.running) if self._is_divided else None
        if giver is None and (giver := giving_sequence(head, held.running, self._limits.max_num_seqs)) is not None:
            giver.priority_key = (*head.priority_key, *giver.priority_key)  # its place is behind `head` now
        if giver is not None:
            self._preempt(giver)

    def _needs_plan_without_rows(self, plan: StepPlan) -> bool:
        """Returns True if `plan` moves pages, or if the next thing to happen is the end of a slow move."""
        return bool(plan.moves_before) or (self._kv.is_loading and not self._in_flight)

    def _plan_running(self, plan: StepPlan, sampling: list[Request], budget: int) -> int:
        """Plans the unplanned tokens of running requests, in priority order; returns the tokens left of `budget`.

        The loop runs once per running request and step, so it touches no object but the request.
        """
        slots, num_computed = plan.slots.append, plan.num_computed.append
        num_scheduled, num_wanted = plan.num_scheduled.append, plan.num_wanted.append
        chunk_size, sample, totals = self._prefill.chunk_size, sampling.append, self._totals
        drafting = self._results.has_drafts
        staged, room = self._num_stages > 1, -(-len(self._held.running) // self._num_stages)
        self._draft_rows.begin(len(self._held.running), budget)
        for request in self._held.running:  # preemption removes from its end, at the earliest this request
            start = request.num_planned_tokens
            end = request.num_tokens
            num_new = end - start
            if staged and start >= request.num_prompt_tokens:
                if not room or start >= request.num_known_tokens:
                    continue
                room -= 1
            if num_new != 1:
                if request.num_drafts:
                    num_new = self._draft_rows.take(request, budget)
                else:
                    paced = self._pace.budget(end, budget)
                    num_new = chunk_size(num_new, paced, self._kv.next_border(start) - start)
                    if request.prompt.prefix_spans:
                        num_new = self._undivided(request, start, num_new, budget)
                    self._num_left_tokens += end - start - num_new
                if not num_new:
                    continue
                end = start + num_new
            if start < request.media_end:
                self._num_left_tokens += end
                end = self._towers.reach(request.prompt.media, start, end)
                self._num_left_tokens -= end
                num_new = end - start
                if not num_new:
                    continue
            if end == request.max_num_tokens:
                continue  # its last token is being sampled
            if end > request.pages_settled_until and not self._grow(request, end, plan):
                break
            if staged and start >= request.num_prompt_tokens:
                drafts = request.draft_ids[: request.num_drafts]
                plan.sampled.append((len(plan.slots), request.known_tokens(start, start + 1) + drafts))
            samples = end == request.num_tokens
            slots(request.slot)
            num_computed(start)
            num_scheduled(num_new)
            request.num_planned_tokens = end
            if start < request.media_end:
                self._towers.take(request.prompt.media, start, end, plan, self._media_in_use)
            if start < request.num_prompt_tokens:
                totals.num_planned_prompt_tokens += request.count_prompt(start, end)
                samples = self._plan_prompt(request, start, end, plan)
            if samples:
                if drafting and request.num_drafts:
                    num_wanted(num_new)
                else:
                    request.num_tokens = end + 1
                    num_wanted(1)
                sample(request)
            else:
                num_wanted(0)
                self._others[len(plan.slots) - 1] = request
            if num_new != 1:
                self._pace.take(request.num_tokens, num_new)
                self._kv.cache_full_blocks(request)
            budget -= num_new
            if not budget:
                break
        return budget

    def _plan_waiting(self, plan: StepPlan, sampling: list[Request], budget: int) -> None:
        """Admits waiting requests in priority order while budget, slots and pages last.

        The first that cannot be admitted stops the loop: no request overtakes another.
        """
        self._short_of_pages = False
        while budget and self._held.free_slots and (request := self._held.waiting.first()) is not None:
            if request.num_placeholders:
                break  # preempted with a token in flight, which must be known first
            if self._held.waits_for_adapter(request):
                continue
            prefix = self._kv.find_prefix(request)
            # Only with a limit on the chunks of prompts can a running prompt be unfinished here. Without one, all
            # running prompts are planned to their ends, and findable, before any request is admitted.
            threshold = self._limits.long_prefill_token_threshold
            is_chunked = threshold or self._pace.is_bounding or self._kv.has_snapshots
            if is_chunked and self._kv.is_underway(request, prefix, self._held.running):
                break
            load = self._kv.load(request, prefix, num_running=len(self._held.running))
            if load is not None:
                self._held.loading.add(self._held.waiting.pop(), load)
                continue
            num_encoded = _rows_to_encode(request, prefix)
            if num_encoded >= budget:
                break  # the step encodes all of an input, and computes a token that attends to it
            start, room = prefix.num_blocks * self._limits.block_size, budget - num_encoded
            border = self._kv.next_border(start) - start
            paced = self._pace.budget(request.num_tokens, room)
            num_new = self._prefill.chunk_size(request.num_tokens - start, paced, border, num_encoded)
            num_new = self._undivided(request, start, num_new, room)
            if start < request.media_end:
                num_new = self._towers.reach(request.prompt.media, start, start + num_new) - start
            if not num_new:
                break
            if not self._kv.admit(request, prefix, start + num_new, num_running=len(self._held.running)):
                self._short_of_pages = True
                break
            self._admit(self._held.waiting.pop(), prefix, plan)
            request.num_planned_tokens = end = start + num_new
            if start < request.media_end:
                self._towers.take(request.prompt.media, start, end, plan, self._media_in_use)
            self._take_snapshot(request, end)
            self._totals.num_planned_prompt_tokens += request.count_prompt(start, end)
            if not request.num_preemptions:
                self._totals.num_planned_prompt_tokens += num_encoded
            self._num_left_tokens += request.num_tokens - end
            plan.slots.append(request.slot)
            plan.num_computed.append(start)
            plan.num_scheduled.append(num_new)
            samples = self._plan_prompt(request, start, end, plan)
            if samples:
                request.num_tokens += 1
                sampling.append(request)
            else:
                self._others[len(plan.slots) - 1] = request
            plan.num_wanted.append(1 if samples else 0)
            self._pace.take(request.num_tokens, num_new)
            self._kv.cache_full_blocks(request)
            budget = room - num_new

    def _media_in_use(self) -> set[bytes]:
        """The images and sounds that running requests have computed some tokens of."""
        return {
            item.digest
            for request in self._held.running
            if request.num_planned_tokens < request.media_end
            for item in request.prompt.media
            if item.start < request.num_planned_tokens < item.end
        }

    def _undivided(self, request: Request, start: int, num_tokens: int, budget: int) -> int:
        """Returns how many of a chunk's `num_tokens` tokens the step computes, so that it divides no prefix span."""
        return undivided(request.prompt.prefix_spans, start, num_tokens, min(budget, self._limits.largest_chunk))

    def _plan_prompt(self, request: Request, start: int, end: int, plan: StepPlan) -> bool:
        """Notes what the plan's newest row, a part of a prompt, wants besides tokens. Returns True if it samples."""
        output = request.output_of(start, end)
        if output is not None:
            row = len(plan.slots) - 1
            plan.outputs.append((row, output))
            self._others[row] = request
        if end < request.num_tokens:
            return False
        self._prefilled.append(request)
        return request.pooling is None

    def _admit(self, request: Request, prefix: CachedPrefix, plan: StepPlan) -> None:
        request.has_loaded = False
        self._turns.on_admitted(request.turn)
        self._held.run(request)
        if self._drafting is not None:
            self._drafting.admit(request)
        if not request.num_preemptions:
            request.scheduled_at = self._clock()
            request.num_cached_tokens = min(request.num_planned_tokens, request.num_prompt_tokens)
        if prefix.snapshot:
            plan.moves_before.append(PageMove("device", prefix.snapshot, "state", [request.slot]))
        plan.admitted.append(request.new_slot())

    def _grow(self, request: Request, num_tokens: int, plan: StepPlan) -> bool:
        """Prepares a running request's next row, up to `num_tokens` tokens. Returns False if the request itself was
        preempted.

        Preempts from the end of `running`. Those requests are not in the plan yet, which is built in priority order. A
        request that is alone fits, because `add` refuses requests that do not, unless a load still holds pages: then
        it preempts itself.
        """
        while (added := self._kv.grow(request, num_tokens)) is None:
            victim = self._preempt_last()
            if victim is request:
                return False
        if any(added):
            plan.appended_pages.append((request.slot, added))
        self._take_snapshot(request, num_tokens)
        return True

    def _take_snapshot(self, request: Request, num_tokens: int) -> None:
        """Makes the planned step copy a request's recurrent state after `num_tokens` tokens, if a snapshot is due."""
        snapshot = self._kv.take_snapshot(request, num_tokens)
        if snapshot is not None:
            self._snapshots.append((request.slot, snapshot))

    def _preempt_last(self) -> Request:
        """Preempts the running request that the policy puts last."""
        return self._preempt(self._held.running[-1])

    def _preempt(self, victim: Request) -> Request:
        """Takes pages and slot from a running request that is not in the plan, and queues it again."""
        self._held.preempt(victim)
        self._totals.num_preemptions += 1
        return victim

    # ------------------------------------------------------------------------------------------------------- results

    def update(self, result: StepResult) -> list[RequestDelta]:
        """Takes in the result of the oldest plan in flight; returns a delta for each of its unfinished requests.

        Raises:
            EngineError: the result is not that of the plan, or the device computes nothing usable any more.
        """
        step = self._in_flight.complete(result)
        self._usable.check(step, result)
        self._pace.measure(step, self._clock())
        if self._drafting is not None:
            self._drafting.measure(step, result, self._clock())
        deltas = self._usable.keep_back(self._results.take(step, result))
        if (probe := self._usable.take_probe()) is not None:
            self._probe(probe)
        return deltas

    # ------------------------------------------------------------------------------------------------------ adapters

    def take_adapter_loads(self) -> list[AdapterWait]:
        """The loads of adapters that became necessary since the last call. The caller starts them in this order, after
        the plans that it has, and reports the end of each by `on_adapter`."""
        return [] if self._held.adapters is None else self._held.adapters.take_new_loads()

    def prefetch_adapter(self, adapter: Adapter) -> AdapterWait:
        """Starts a load of an adapter into the host's memory, or joins one."""
        assert self._held.adapters is not None, "the workers take adapters"
        return self._held.adapters.prefetch(adapter)

    def on_adapter(self, wait: AdapterWait, failure: RequestFailure | None) -> list[RequestDelta]:
        """Takes in the end of a load. After a `failure`, returns the last deltas of the requests that waited for it."""
        assert self._held.adapters is not None, "the workers take adapters"
        self._held.adapters.finish(wait, is_there=failure is None)
        waited = self._held.queue_again(wait)
        self._held.queue_again(self._held.adapters.for_slot)
        if failure is None:
            return []
        return [self._results.fail(request, failure) for request in waited]

    # --------------------------------------------------------------------------------------------- limits and figures

    def stats(self) -> SchedulerStats:
        """Current gauges, and totals since the start."""
        totals = self._totals
        return SchedulerStats(
            len(self._held.running),
            self._held.num_waiting,
            self._kv.usage,
            totals.started_at,
            *self._kv.prefix_cache_counts,
            totals.num_preemptions,
            totals.num_steps,
            self._in_flight.num_prompt_tokens_done,
            totals.num_prefilled_tokens,
            totals.num_generated_tokens,
            totals.expert_balancedness,
            self._held.num_new_tokens + self._num_left_tokens,
            [] if self._held.adapters is None else self._held.adapters.running_names,
            [] if self._held.adapters is None else self._held.adapters.waiting_names,
            totals.num_drafts,
            totals.num_draft_tokens,
            totals.num_accepted_by_position.copy(),
        )

    def reset_prefix_cache(self, *, preempt_running: bool = False) -> bool:
        """Forgets all cached pages that no request uses, and the rows of towers.

        Returns True if no page is findable any more.

        Args:
            preempt_running: take the pages of running requests too; they are computed again from their tokens.
        """
        while preempt_running and self._held.running:
            self._preempt_last()
        self._towers.reset(self._media_in_use())
        return self._kv.reset_prefix_cache()

    def check_invariants(self) -> None:
        """Asserts that every page, slot and request is counted exactly once."""
        self._kv.check_invariants(self._held.by_id.values())
        self._held.check_invariants()
        keys = [request.priority_key for request in self._held.running]
        self._towers.check_invariants()
        assert self._is_divided or keys == sorted(keys), "priority order broken"
        for request in self._held:
            self._in_flight.check_invariants(request)
            assert request.num_tokens <= request.max_num_tokens, f"{request.request_id} outran its length limit"


def _rows_to_encode(request: Request, prefix: CachedPrefix) -> int:
    """Rows of the request's encoder input that the step which admits it has to compute."""
    encoder = request.prompt.encoder
    return 0 if encoder is None or prefix.encoded is not None else encoder.num_rows
