"""Divides a step's rows of logits over the drafts of running requests."""

from quire.core.config.resolved import SchedulerLimits
from quire.core.kv.kv_cache import KVCacheManager
from quire.core.scheduling.request import Request


class DraftRows:
    """Use `begin` for each plan, and `take` for each request with drafts, in priority order.

    Each running request keeps the place of one token: drafts get what the others leave, and all together have no more
    rows of logits than the memory plan counts.
    """

    def __init__(self, limits: SchedulerLimits, kv: KVCacheManager) -> None:
        self._most = limits.most_draft_rows
        self._kv = kv
        self._room = 0  # drafts that the planned step may still check

    def begin(self, num_running: int, budget: int) -> None:
        """Begins a plan of `budget` tokens."""
        self._room = min(budget, self._most) - num_running

    def take(self, request: Request, budget: int) -> int:
        """Returns how many tokens the step computes for a request with drafts: its newest, and drafts that fit.

        A snapshot at a border is of known tokens alone, so a row with drafts ends before it. 0: a step in flight still
        samples the newest token.
        """
        start = request.num_planned_tokens
        most = min(budget, self._kv.next_border(start) - 1 - start, 1 + self._room)
        num_tokens = request.take_drafts(max(1, most))
        self._room -= max(0, num_tokens - 1)
        return num_tokens
