"""Requests with adapters: who runs, who waits for a slot, and what is loaded when."""

import random
from typing import Any

import pytest

from quire.core.scheduling.adapter_slots import AdapterWait
from quire.core.wire.adapters import Adapter
from quire.core.wire.protocol import FinishReason, RequestDelta, StepPlan
from quire.core.wire.row_outputs import RequestFailure
from tests.core.scheduling.fake_worker import Harness, expect_outputs, make_request


def adapter(number: int) -> Adapter:
    return Adapter(f"name {number}", f"/{number}", bytes([number]))


class AdapterHarness(Harness):
    """The loads that the scheduler decides on begin after the plans, and end when `finish` is called, or at once."""

    def __init__(self, *, max_adapters: int = 2, on_host: int = 4, at_once: bool = True, **options: Any) -> None:
        super().__init__(max_adapters=max_adapters, max_adapters_on_host=on_host, **options)
        self.at_once = at_once
        self.loads: list[AdapterWait] = []
        self.started: list[tuple[str, int, list[bytes]]] = []
        self.held: set[bytes] = set()

    def plan(self) -> StepPlan | None:
        plan = super().plan()
        new = self.scheduler.take_adapter_loads()
        for wait in new:
            assert wait.load is not None
            self.started.append((wait.load.adapter.name, wait.load.slot, wait.load.dropped))
            self.held -= set(wait.load.dropped)
            self.held.add(wait.load.adapter.digest)
            self.worker.adapters.pop(wait.load.slot, None)
        self.loads += new
        assert len(self.held) <= self.limits.max_adapters_on_host + len(self.loads)
        while self.at_once and self.loads:
            self.finish()
        return plan or (super().plan() if new else None)

    def finish(self, error: str | None = None) -> list[RequestDelta]:
        """Ends the oldest load."""
        wait = self.loads.pop(0)
        assert wait.load is not None
        if wait.load.slot >= 0 and error is None:
            self.worker.adapters[wait.load.slot] = wait.load.adapter.digest
        failure = None if error is None else RequestFailure("invalid", error)
        deltas = self.scheduler.on_adapter(wait, failure)
        for delta in deltas:
            self.streams[delta.request_id].take(delta)
        if self.check:
            self.scheduler.check_invariants()
        return deltas

    def step(self) -> list[RequestDelta]:
        if not self.in_flight and self.plan() is None and self.loads:
            self.finish()
            return []
        return super().step()


@pytest.mark.parametrize("seed", range(6))
def test_random_requests_run_each_with_its_adapter(seed: int) -> None:
    """Among preemptions, aborts and loads of any length, with more adapters than slots and than the host has."""
    rng = random.Random(seed)
    harness = AdapterHarness(
        max_adapters=rng.choice([1, 2, 3]), on_host=3, at_once=False, num_pages=40, max_num_seqs=rng.choice([2, 6]),
        depth=rng.choice([1, 2]),
    )  # fmt: skip
    stem = [rng.randrange(40) for _ in range(16)]
    requests = [
        make_request(
            str(number),
            stem[: rng.randrange(16)] + [rng.randrange(40) for _ in range(rng.choice([1, 5, 20]))],
            seed=number,
            max_tokens=rng.choice([1, 4, 20]),
            adapter=rng.choice([None, *map(adapter, range(5))]),
        )
        for number in range(60)
    ]
    waiting = list(requests)
    while waiting or harness.scheduler.has_unfinished():
        for _ in range(rng.randrange(4)):
            if waiting:
                assert harness.offer(waiting.pop()) is None
        if rng.random() < 0.1 and harness.streams:
            harness.abort(rng.choice(list(harness.streams)))
        if harness.loads and rng.random() < 0.3:
            harness.finish()
        if harness.scheduler.has_unfinished() or harness.in_flight:
            harness.step()
    harness.run()
    expect_outputs(harness, requests)
    assert not harness.scheduler.stats().running_adapters
    assert not harness.scheduler.stats().waiting_adapters


def test_requests_of_one_adapter_share_its_slot_and_its_cached_prefixes() -> None:
    harness = AdapterHarness()
    prompt = list(range(1, 17))
    for name, one in (("a", adapter(1)), ("b", adapter(1)), ("c", adapter(2)), ("d", None)):
        harness.add(name, prompt, adapter=one)
        harness.run()
    assert [(name, slot) for name, slot, _ in harness.started] == [("name 1", 0), ("name 2", 1)]
    cached = {name: stream.last.num_cached_tokens for name, stream in harness.streams.items() if stream.last}
    assert (cached["a"], cached["c"], cached["d"]) == (0, 0, 0)
    assert cached["b"] > 0


def test_others_run_while_an_adapter_is_loaded() -> None:
    harness = AdapterHarness(at_once=False)
    harness.add("adapted", 4, adapter=adapter(1))
    harness.add("plain", 4)
    for _ in range(4):
        harness.step()
    assert harness.streams["plain"].finish_reason is FinishReason.LENGTH
    stats = harness.scheduler.stats()
    assert (stats.waiting_adapters, stats.running_adapters, stats.num_waiting) == (["name 1"], [], 1)
    harness.finish()
    harness.run()
    assert len(harness.streams["adapted"].token_ids) == 4


def test_a_request_waits_for_a_slot_and_others_overtake_it_so_often_at_most() -> None:
    harness = AdapterHarness(max_adapters=1, max_num_seqs=2)
    harness.add("first", 4, adapter=adapter(1), max_tokens=30)
    harness.step()
    harness.add("other", 4, adapter=adapter(2))
    for number in range(6):
        harness.add(f"like first {number}", 4, adapter=adapter(1), max_tokens=2)
    harness.run()
    order = list(harness.streams)
    assert harness.started == [("name 1", 0, []), ("name 2", 0, []), ("name 1", 0, [])]
    ends = {name: harness.streams[name].finish_reason for name in order}
    assert set(ends.values()) == {FinishReason.LENGTH}


def test_the_adapter_that_was_used_longest_ago_leaves_slot_and_host() -> None:
    harness = AdapterHarness(max_adapters=2, on_host=3)
    for name, number in enumerate([1, 2, 1, 3, 4, 2]):
        harness.add(str(name), 4, adapter=adapter(number))
        harness.run()
    assert harness.started == [
        ("name 1", 0, []),
        ("name 2", 1, []),
        ("name 3", 1, []),
        ("name 4", 0, [b"\x02"]),
        ("name 2", 1, [b"\x01"]),
    ]


def test_a_load_that_fails_ends_the_requests_that_wait_for_it_and_no_others() -> None:
    harness = AdapterHarness(at_once=False)
    harness.add("a", 4, adapter=adapter(1))
    harness.add("b", 4, adapter=adapter(1))
    harness.add("c", 4, adapter=adapter(2))
    harness.plan()
    deltas = harness.finish("it does not fit")
    assert [(delta.request_id, delta.failure and delta.failure.message) for delta in deltas] == [
        ("a", "it does not fit"),
        ("b", "it does not fit"),
    ]
    harness.finish()
    harness.run()
    assert harness.streams["c"].finish_reason is FinishReason.LENGTH


def test_workers_drop_what_they_read_of_an_adapter_that_failed() -> None:
    harness = AdapterHarness(at_once=False)
    for number in (1, 2):
        harness.add(str(number), 4, adapter=adapter(number))
        harness.plan()
        harness.finish("one rank has no such layer" if number == 1 else None)
        harness.run()
    assert harness.started == [("name 1", 0, []), ("name 2", 1, [b"\x01"])]


def test_what_waits_for_an_adapter_counts_in_the_bytes_of_the_queue() -> None:
    harness = AdapterHarness(max_adapters=1, at_once=False, max_num_seqs=2, max_num_queued_bytes=5000)
    for name in ("runs first", "waits"):
        harness.add(name, 60, adapter=adapter(1))
    harness.plan()  # both wait for the load
    assert harness.scheduler.stats().num_waiting == 2
    harness.add("plain", 4)
    failure = harness.offer(make_request("too much", 4))
    assert failure is not None
    assert (failure.kind, failure.limit) == ("overloaded", "max_num_queued_bytes")
    harness.finish()
    harness.run()
    assert harness.offer(make_request("now there is room", 4)) is None


def test_a_new_version_under_an_old_name_shares_nothing_with_it() -> None:
    harness = AdapterHarness(max_adapters=2)
    old, new = Adapter("name", "/a", b"old"), Adapter("name", "/a", b"new")
    prompt = list(range(1, 17))
    harness.add("old", prompt, adapter=old, max_tokens=20)
    harness.step()
    harness.add("new", prompt, adapter=new)
    harness.run()
    requests = [make_request("old", prompt, adapter=old, max_tokens=20), make_request("new", prompt, adapter=new)]
    expect_outputs(harness, requests)


def test_an_engine_without_adapters_refuses_a_request_that_names_one() -> None:
    failure = Harness().offer(make_request("a", 4, adapter=adapter(1)))
    assert failure is not None
    assert "--enable-lora" in failure.message
