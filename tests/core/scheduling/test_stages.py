"""Plans for several pipeline stages: as many in flight as stages, of different requests."""

from typing import Any

import pytest

from quire.core.config.speculative import Speculation
from tests.core.scheduling.fake_worker import FakeDrafter, Harness


def test_running_requests_are_divided_over_the_plans_in_flight() -> None:
    harness = Harness(depth=2, num_stages=2)
    for name in "abcde":
        harness.add(name, 3, max_tokens=20)
    for _ in range(3):
        harness.step()
    for _ in range(8):
        while len(harness.in_flight) < 2:
            assert harness.plan() is not None
        first, second = harness.plans[-2:]
        assert not set(first.slots) & set(second.slots), "a request is in two stages at once"
        assert {len(first.slots), len(second.slots)} == {2, 3}
        assert harness.plan() is None, "nothing is left to plan before a result is back"
        harness.result()
    harness.run()


@pytest.mark.parametrize("drafter", [None, FakeDrafter(3)], ids=["alone", "with-drafts"])
def test_a_plan_tells_the_tokens_that_were_sampled(drafter: FakeDrafter | None) -> None:
    harness = Harness(depth=3, num_stages=3, num_pages=9, drafter=drafter)
    for number, name in enumerate("abcd"):
        harness.add(name, 3 + number, max_tokens=9)
    slots: dict[int, list[int]] = {}  # what a first stage knows of each slot's tokens
    done = 0
    while harness.scheduler.has_unfinished() or harness.in_flight:
        harness.step()
        for plan in harness.plans[done:]:
            for new in plan.admitted:
                slots[new.slot] = list(new.token_ids)
            for row, tokens in plan.sampled:
                assert plan.num_computed[row] <= len(slots[plan.slots[row]])
                slots[plan.slots[row]][plan.num_computed[row] :] = tokens
            for slot, start, count in zip(plan.slots, plan.num_computed, plan.num_scheduled, strict=True):
                assert start + count <= len(slots[slot]), "a token is not known where it is needed"
        done = len(harness.plans)
    assert harness.scheduler.stats().num_preemptions, "requests must come back with tokens of theirs"


def test_the_chunks_of_a_prompt_follow_one_another_through_the_stages() -> None:
    harness = Harness(depth=3, num_stages=3, max_num_batched_tokens=4)
    harness.add("a", 12, max_tokens=3)
    for start in (0, 4, 8):
        plan = harness.plan()
        assert plan is not None
        assert (plan.num_computed, plan.num_scheduled) == ([start], [4])
    assert harness.plan() is None
    harness.run()


@pytest.mark.parametrize("drafting", [False, True])
@pytest.mark.parametrize("num_stages", [2, 3])
def test_streams_are_those_of_one_stage(num_stages: int, *, drafting: bool) -> None:
    def streams(**options: Any) -> dict[str, list[int]]:
        harness = Harness(num_pages=14, **options)
        for number in range(9):
            harness.add(str(number), 1 + 5 * number % 17, max_tokens=5 + number)
        harness.step()
        harness.abort("3")
        harness.run()
        return {name: stream.token_ids for name, stream in harness.streams.items() if name != "3"}

    drafter = FakeDrafter(num_stages) if drafting else None
    assert streams(num_stages=num_stages, depth=num_stages, drafter=drafter) == streams()


def test_requests_with_drafts_keep_no_other_stage_waiting() -> None:
    """Beside those whose drafts are checked, the others are planned."""
    harness = Harness(
        depth=2,
        num_stages=2,
        drafter=FakeDrafter(1),
        speculation=Speculation(method="ngram", num_tokens=7, is_adaptive=False),
    )
    for name in "abcd":
        harness.add(name, 3, max_tokens=60)
    for _ in range(3):
        harness.step()
    num_alone = 0
    for _ in range(10):
        while len(harness.in_flight) < 2 and harness.plan() is not None:
            pass
        num_alone += len(harness.in_flight) < 2
        harness.result()
    assert not num_alone
    assert harness.scheduler.stats().num_draft_tokens
    harness.run()
