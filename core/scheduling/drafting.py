"""Decides how many drafts each request may have, so that the engine is never slower than without.

What is measured as the engine runs: how often the drafts of a request are right, by position (`Acceptance`), and how
much longer a step with drafts takes, by the number of its rows (`DraftCosts`). Every few steps, each running request
gets the number of drafts of which every one brings more tokens than its time is worth. If all these together would not
pay, nobody gets any, and from time to time one request tries again.
"""

from collections.abc import Sequence

from quire.core.config.speculative import Speculation
from quire.core.scheduling.acceptance import Acceptance
from quire.core.scheduling.draft_costs import DraftCosts
from quire.core.scheduling.in_flight import StepInFlight
from quire.core.scheduling.request import Request, RequestStatus
from quire.core.wire.protocol import StepPlan, StepResult

DECIDE_EVERY = 4
"""Steps from one decision to the next."""
MARGIN = 1.08
"""Drafts pay if they promise so many times the tokens a second."""
FIRST_PAUSE, LONGEST_PAUSE = 32, 1024
"""Steps between two attempts while drafts do not pay: after each that brought wrong drafts, four times as many."""
TRY = 3
"""Plans of an attempt: drafts are of use only after a plan that was not made ahead of them."""
REST = 32
"""Decodes for which a request whose drafts do not pay has none, before it tries one again."""
SCARCE = 0.3
"""Where fewer requests have drafts, wrong ones cost little."""
FREE = 1.01
"""Asking for drafts costs nothing if a step takes no longer than this, over one in which nobody asks."""
PLAIN_EVERY = 256
"""While drafts pay, one of so many steps is planned without, to know what it would take."""
ENOUGH = 5
"""Rows with drafts after which their acceptance is known."""
PROMPT_SECONDS = 0.01
"""A plan made so soon after a result follows it; the time between the two is a part of the step."""


class Drafting:
    """Use `admit` for each request that begins to run, `limit` for each plan, and `measure` for each result.

    Args:
        speculation: the options.
        num_stages: pipeline stages, over whose steps the running requests are divided.
    """

    def __init__(self, speculation: Speculation, num_stages: int = 1) -> None:
        self._options = speculation
        self._num_stages = num_stages
        self._costs = DraftCosts()
        self._by_kind: dict[str, Acceptance] = {}  # what is known of all requests with such drafts
        self._last_result_at = 0.0
        self._next_decision = 0  # of `_num_plans`
        self._next_attempt = 0
        self._pause = FIRST_PAUSE
        self._num_plans = 0
        self._turn = 0  # of the request that tries next
        self.is_on = False
        self._active_until = -1  # of `_num_plans`: drafts may be under way

    @property
    def is_active(self) -> bool:
        """True if workers may hold drafts, or steps in flight check some."""
        return self._num_plans <= self._active_until

    def admit(self, request: Request) -> None:
        """Prepares a request that begins to run."""
        if request.drafts is None and (kind := self._kind_of(request)) is not None:
            known = self._by_kind.setdefault(kind, Acceptance(keep=0.98))
            request.drafts = Acceptance(known)
        request.draft_limit = 0
        if request.drafts is not None:
            self._next_decision = self._num_plans

    def _kind_of(self, request: Request) -> str | None:
        """The most certain source of a request's drafts; None: it has none."""
        if request.pooling is not None:
            return None
        if request.prediction:
            return "prediction"
        if request.grammar is not None:
            return "grammar"
        return self._options.method

    def _most(self, request: Request, num_rows: int) -> int:
        most = self._options.num_tokens
        if request.prediction or request.grammar is not None:
            most = self._options.most_drafts
        for first, last, limit in self._options.by_batch_size:
            if first <= num_rows <= last:
                most = min(most, limit)
        return most

    # --------------------------------------------------------------------------------------------------------- decide

    def waits(self, running: Sequence[Request]) -> bool:
        """Returns True if a plan made now would lack requests whose drafts, or whose tokens before them, are on their
        way: the step with all of them is worth the wait. With several stages, plans are of different requests."""
        if self._num_stages > 1:
            return False
        return self.is_active and any(
            request.num_drafts and request.num_planned_tokens >= request.num_known_tokens for request in running
        )

    def _decide(self, running: Sequence[Request]) -> None:
        """Sets the limits of the requests, if it is time."""
        self._num_plans += 1
        if not self._options.is_adaptive:
            for request in running:
                request.draft_limit = 0 if request.drafts is None else self._most(request, len(running))
            self.is_on = True
            return
        if self.is_on and self._num_plans % PLAIN_EVERY == 0:
            self._stop(running)
            self._next_decision = self._num_plans + 2
            return
        if self._num_plans < self._next_decision:
            return
        self._next_decision = self._num_plans + DECIDE_EVERY
        drafting = [request for request in running if request.drafts is not None]
        if not drafting:
            self._stop(running)
            return
        if not self._costs.is_known(self._rows_of_step(len(running))):
            self._stop(running)
            self._next_decision = self._num_plans + 1
            return
        unknown = [request for request in drafting if not self._is_known(request)]
        if len(running) > 1 and unknown:
            known = [request for request in drafting if self._is_known(request)]
            self.is_on = bool(known) and self._pays(known, len(running))
            self._try(unknown, running, most=2, others=known if self.is_on else ())
        elif self._pays(drafting, len(running)):
            self.is_on = True
            self._pause = FIRST_PAUSE
        elif self._num_plans >= self._next_attempt:
            scarce = all(request.drafts is None or request.drafts.supply < SCARCE for request in drafting)
            self._pause = FIRST_PAUSE if scarce else min(4 * self._pause, LONGEST_PAUSE)
            self._next_attempt = self._num_plans + self._pause
            self._try(drafting, running, most=1)
            self._next_decision = self._num_plans + TRY
        else:
            self._stop(running)

    def _rows_of_step(self, num_running: int) -> int:
        return -(-num_running // self._num_stages)

    def _is_known(self, request: Request) -> bool:
        kind = self._kind_of(request)
        known = None if kind is None else self._by_kind[kind]
        return known is not None and (known.num_seen >= ENOUGH or known.supply < SCARCE)

    def _pays(self, drafting: Sequence[Request], num_rows: int) -> bool:
        """Sets each request's limit, and returns True if all together pay."""
        cost = self._costs.of(self._rows_of_step(num_rows))
        worth = 1.0  # tokens of a row, in the time of a step without drafts
        for _ in range(2):
            num_tokens, num_drafts, checks, num_asked = float(num_rows), 0.0, 0.0, 0
            for request in drafting:
                assert request.drafts is not None
                supply = request.drafts.supply
                limit, gain = request.drafts.best(self._most(request, num_rows), worth * cost.draft)
                if supply * (gain - worth * cost.draft * limit) <= worth * cost.asking:
                    limit, gain = 0, 0.0
                if not limit and request.draft_rest <= 0:
                    limit = 1
                request.draft_limit = limit
                num_tokens += supply * gain
                num_drafts += supply * limit
                checks += supply if limit else 0.0
                num_asked += limit > 0
            time = cost.of_step(min(checks, 1.0), num_drafts / num_rows, num_asked / num_rows)
            worth = max(1.0, num_tokens / num_rows / time)
        return num_asked > 0 and (num_tokens / num_rows >= MARGIN * time or time <= FREE)

    def _try(
        self, drafting: Sequence[Request], running: Sequence[Request], most: int, others: Sequence[Request] = ()
    ) -> None:
        """Lets one request, in turns, have a few drafts; `others` keep theirs."""
        if not others:
            self._stop(running)
        for request in drafting:
            request.draft_limit = 0
        self._turn = (self._turn + 1) % len(drafting)
        request = drafting[self._turn]
        request.draft_limit = min(most, self._most(request, len(running)))

    def _stop(self, running: Sequence[Request]) -> None:
        self.is_on = False
        for request in running:
            request.draft_limit = 0

    def limit(self, plan: StepPlan, sampling: Sequence[Request], running: Sequence[Request]) -> None:
        """Notes in a plan how many drafts its rows that sample may have."""
        self._decide(running)
        limits = [request.draft_limit for request in sampling]
        plan.draft_limits = limits if any(limits) else []
        if plan.draft_limits:
            self._active_until = self._num_plans + 4

    # -------------------------------------------------------------------------------------------------------- measure

    def measure(self, step: StepInFlight, result: StepResult, now: float) -> None:
        """Takes in the drafts that a step checked and those that are new, and its time."""
        plan, limits = step.plan, step.plan.draft_limits or []
        follows = step.planned_at - self._last_result_at < PROMPT_SECONDS
        seconds = now - (self._last_result_at if follows else step.planned_at)
        self._last_result_at = now
        num_drafts = 0
        held = result.num_drafts
        num_rows = len(step.requests)
        if limits or max(plan.num_wanted, default=0) > 1:
            wanted = [count for count in plan.num_wanted if count]
            for row, (request, count, tokens) in enumerate(zip(step.requests, wanted, result.token_ids, strict=True)):
                if count > 1:
                    num_drafts += count - 1
                    self._active_until = self._num_plans + 4
                    if request.drafts is not None and request.status is not RequestStatus.FINISHED:
                        request.drafts.add(count - 1, len(tokens) - 1)
                        request.draft_rest = 0 if len(tokens) > 1 else REST
                elif request.draft_rest:
                    request.draft_rest -= 1
                if limits and limits[row] and request.drafts is not None:
                    request.drafts.add_supply(bool(held and held[row]))
        if plan.num_scheduled != plan.num_wanted or not num_rows or seconds <= 0:  # with a part of a prompt
            return
        if limits:
            self._costs.add(num_rows, num_drafts, sum(map(bool, limits)), seconds)
        elif not num_drafts:
            self._costs.add_plain(num_rows, seconds)
