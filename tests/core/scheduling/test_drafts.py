"""Rows with drafts: their plans, and the effects of their results. `test_workloads.py` has random drafts."""

import math
from itertools import count

from quire.core.config.resolved import SchedulerLimits
from quire.core.scheduling.scheduler import Scheduler
from quire.core.wire.protocol import FinishReason, RequestDelta, StepPlan, StepResult
from quire.core.wire.row_outputs import TokenLogprobs
from tests.core.scheduling.fake_worker import FULL, Clock, make_request


class Steps:
    """A scheduler whose results are written by hand. Request "a" has a prompt of 6 tokens, pages hold 4."""

    def __init__(self, *, num_pages: int = 64, max_tokens: int = 20, clock: Clock | None = None, **limits) -> None:
        options = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": 4} | limits
        self.scheduler = Scheduler(
            SchedulerLimits(**options),
            kv_groups=[FULL],
            num_pages=num_pages,
            max_model_len=100,
            eos_token_ids=(),
            clock=clock or Clock(),
        )
        self._ids = count()
        self.add("a", max_tokens=max_tokens)

    def add(self, request_id: str, num_prompt: int = 6, **sampling) -> None:
        assert self.scheduler.add(make_request(request_id, num_prompt, **{"max_tokens": 20} | sampling)) == []

    def plan(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        self.scheduler.check_invariants()
        return plan

    def result(self, *token_ids: list[int], drafts: list[int] | None = None, logprobs=()) -> list[RequestDelta]:
        result = StepResult(next(self._ids), [*token_ids], [*logprobs], num_drafts=drafts or [])
        deltas = self.scheduler.update(result)
        self.scheduler.check_invariants()
        return deltas


def rows(plan: StepPlan | None) -> list[tuple[int, int, int]]:
    """(first position, positions, wanted) of each row."""
    assert plan is not None
    return list(zip(plan.num_computed, plan.num_scheduled, plan.num_wanted, strict=True))


def test_drafts_are_computed_with_the_token_before_them_and_rejected_ones_again() -> None:
    steps = Steps()
    assert rows(steps.plan()) == [(0, 6, 1)]
    steps.result([50], drafts=[3])
    assert rows(steps.plan()) == [(6, 4, 4)]  # the known token at 6, drafts at 7, 8 and 9
    (delta,) = steps.result([51, 52], drafts=[2])
    assert delta.token_ids == [51, 52]
    assert rows(steps.plan()) == [(8, 3, 3)]  # 7 held the accepted draft, 8 a rejected one
    steps.result([53, 54, 55])
    assert rows(steps.plan()) == [(11, 1, 1)]  # all accepted, and nothing drafted since


def test_a_row_with_drafts_keeps_its_request_and_nobody_else_from_being_planned_ahead() -> None:
    steps = Steps()
    steps.add("b")
    steps.plan()
    steps.result([50], [60], drafts=[2, 0])
    assert rows(steps.plan()) == [(6, 3, 3), (6, 1, 1)]
    assert rows(steps.plan()) == [(7, 1, 1)]
    steps.result([51], [61])
    assert rows(steps.plan()) == [(7, 1, 1), (8, 1, 1)]


def test_drafts_that_come_while_a_later_token_is_sampled_wait_for_it() -> None:
    """The row in flight samples the token at the first draft's position, so only that row's own drafts are used."""
    steps = Steps()
    steps.plan()
    assert rows(steps.plan()) == [(6, 1, 1)]
    steps.result([50], drafts=[3])
    assert steps.plan() is None
    steps.result([51], drafts=[2])
    assert rows(steps.plan()) == [(7, 3, 3)]


def test_a_result_without_drafts_ends_the_waiting() -> None:
    steps = Steps()
    steps.plan()
    steps.plan()
    steps.result([50], drafts=[3])
    steps.result([51])
    assert [rows(steps.plan()), rows(steps.plan())] == [[(7, 1, 1)], [(8, 1, 1)]]


def test_drafts_end_before_the_length_limit() -> None:
    """Of three more tokens, two can be drafts: the last is sampled at the second one's position."""
    steps = Steps(max_tokens=4)
    steps.plan()
    steps.result([50], drafts=[9])
    assert rows(steps.plan()) == [(6, 3, 3)]
    (delta,) = steps.result([51, 52, 53], drafts=[9])
    assert (delta.token_ids, delta.finish_reason) == ([51, 52, 53], FinishReason.LENGTH)
    assert not steps.scheduler.has_unfinished()


def test_drafts_that_the_budget_has_no_room_for_are_left_out() -> None:
    steps = Steps(max_num_batched_tokens=8)
    steps.plan()
    steps.add("b", num_prompt=2)
    steps.plan()
    steps.result([50], drafts=[9])
    steps.result([51], [60], drafts=[5, 7])
    assert rows(steps.plan()) == [(7, 6, 6), (2, 2, 2)]
    steps.result([52], [61])
    assert rows(steps.plan()) == [(8, 1, 1), (3, 1, 1)]


def test_drafts_are_no_longer_than_the_largest_chunk_of_a_request() -> None:
    steps = Steps(long_prefill_token_threshold=3)
    steps.plan()
    steps.result()
    steps.plan()
    steps.result([50], drafts=[7])
    assert rows(steps.plan()) == [(6, 3, 3)]


def test_a_stop_token_among_accepted_drafts_drops_the_rest_and_its_logprobs() -> None:
    steps = Steps()
    steps.scheduler.abort(["a"])
    steps.add("b", stop_token_ids=[77], logprobs=0)
    steps.plan()
    steps.result([50], drafts=[3])
    steps.plan()
    values = [TokenLogprobs([token], [-1.0], 1) for token in (51, 77, 52)]
    (delta,) = steps.result([51, 77, 52], drafts=[3], logprobs=[(0, values)])
    assert (delta.token_ids, delta.finish_reason, delta.stop_token_id) == ([51, 77], FinishReason.STOP, 77)
    assert delta.logprobs == values[:2]
    assert steps.scheduler.stats().kv_cache_usage == 0


def test_only_accepted_tokens_are_found_by_others() -> None:
    steps = Steps()
    steps.plan()
    steps.result([50], drafts=[7])
    assert rows(steps.plan()) == [(6, 8, 8)]  # drafts fill the second page and the third
    steps.result([51])
    known = [*make_request("a", 6).prompt_token_ids, 50, 51]
    assert steps.scheduler.add(make_request("b", [*known, 52, 53, 54, 55, 56])) == []
    plan = steps.plan()
    assert rows(plan) == [(7, 1, 1), (4, 9, 1)]  # the page with 51 in it is complete when 51 is computed


def test_a_request_preempted_with_drafts_in_flight_goes_on_after_the_accepted_ones() -> None:
    steps = Steps(num_pages=7)
    steps.add("b")
    steps.plan()
    steps.result([50], [60], drafts=[0, 2])
    assert rows(steps.plan()) == [(6, 1, 1), (6, 3, 3)]
    num_mtp = 0
    while steps.scheduler.stats().num_preemptions == 0:  # a takes page after page
        assert [row[1:] for row in rows(steps.plan())] == [(1, 1)]
        num_mtp += 1
    assert [delta.token_ids for delta in steps.result([51], [61, 62], drafts=[0, 3])] == [[51], [61, 62]]
    for _ in range(num_mtp):
        steps.result([52])
    steps.scheduler.abort(["a"])
    plan = steps.plan()
    assert plan is not None
    assert plan.admitted[0].token_ids[6:] == [60, 61, 62]
    assert rows(plan) == [(4, 5, 1)]  # its first page is found again; drafts stayed behind with the slot


def test_the_speed_that_clients_are_told_counts_every_token() -> None:
    clock = Clock()
    steps = Steps(clock=clock, max_tokens=80, max_num_seqs=1, max_num_queued_reqs=1)
    steps.plan()
    steps.result([50], drafts=[9])
    steps.plan()
    steps.result(list(range(51, 61)))
    steps.add("b")
    clock.now += 1.0
    [delta] = steps.scheduler.add(make_request("c", 4))
    assert delta.failure is not None
    assert delta.failure.retry_after_seconds == math.ceil((80 - 11) / 11)  # 11 came in a second, 69 may still come
