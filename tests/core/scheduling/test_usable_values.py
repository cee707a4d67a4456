"""When unusable values are the device's fault, and not that of a request."""

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from quire.core.errors import EngineError
from quire.core.wire.adapters import Adapter
from quire.core.wire.protocol import ROW_DIGEST_BYTES, FinishReason, PromptEmbeds, RequestDelta, StepResult
from quire.core.wire.row_outputs import RequestFailure
from tests.core.scheduling.fake_worker import EOS, Harness, make_request

BROKEN = Adapter("broken", "/broken", b"broken")
NAN = RequestFailure("internal", "NaN", may_pass=True)
NO_MEMORY = RequestFailure("internal", "no memory")


def unusable(*rows: int) -> Callable[[StepResult], StepResult]:
    """Makes these rows of a result unusable; all rows, if there are none."""

    def change(result: StepResult) -> StepResult:
        result.outputs += [(row, NAN) for row in rows or range(len(result.token_ids))]
        return result

    return change


def without_memory(*rows: int) -> Callable[[StepResult], StepResult]:
    """Takes the values of these rows of a result away, for lack of memory."""

    def change(result: StepResult) -> StepResult:
        result.outputs += [(row, NO_MEMORY) for row in rows]
        return result

    return change


def fail(harness: Harness, *rows: int) -> list[RequestDelta]:
    """One step whose rows are unusable."""
    harness.on_result = unusable(*rows)
    return harness.step()


def broken(num_requests: int, num_steps: int) -> Harness:
    """A scheduler after steps that failed so many requests each, which were all that it had."""
    harness = Harness(max_num_seqs=16, max_num_batched_tokens=512)
    for step in range(num_steps):
        for number in range(num_requests):
            harness.add(f"{step}-{number}-0-0", 4)
        fail(harness)
    return harness


def test_requests_that_fail_together_twice_are_the_devices_fault() -> None:
    harness = broken(3, 1)
    assert not harness.scheduler.has_unfinished()
    for number in range(3):
        harness.add(f"0-{number}-0-0", 4)  # each is tried again
    assert fail(harness) == [], "they may succeed in the next engine"
    assert harness.scheduler.has_unfinished()
    with pytest.raises(
        EngineError, match="NaN or infinite for each of the last 3 requests, and then for a prompt of one"
    ):
        fail(harness)


def test_requests_that_fail_one_after_another_are_it_at_last() -> None:
    harness = broken(1, 7)
    harness.add("8-0-0-0", 4)
    assert fail(harness) == []
    with pytest.raises(EngineError, match="the last 8 requests"):
        fail(harness)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("is_known", [False, True])
def test_an_engine_that_computes_a_probe_goes_on_and_its_failures_are_delivered(is_known: bool, depth: int) -> None:
    """Prompts that overflow, as many as one likes, end no engine."""
    harness = Harness(max_num_seqs=16, max_num_batched_tokens=512, depth=depth)
    fine = [50, 51, 52]
    if is_known:
        harness.add("long-0-0", 9, max_tokens=2)
        harness.add("fine-0-0", fine, max_tokens=2)
        harness.run()
    num_probes = 0
    for turn in range(20):
        for number in range(4):
            harness.add(f"{turn}-{number}-0-0", 4)
        while any(harness.streams[f"{turn}-{number}-0-0"].finish_reason is None for number in range(4)):
            harness.on_result = lambda result: result
            plan = harness.plan()
            prompts = [] if plan is None else [new.token_ids for new in plan.admitted]
            if prompts in ([fine], [[EOS]]):
                num_probes += 1
            elif plan is not None:
                harness.in_flight[-1] = unusable()(harness.in_flight[-1])
            if len(harness.in_flight) == depth or plan is None:
                harness.result()
    assert num_probes == 10, "two steps raise a doubt"
    assert {stream.finish_reason for name, stream in harness.streams.items() if name[0].isdigit()} == {
        FinishReason.ERROR
    }
    harness.run()


def test_a_probe_goes_before_requests_that_wait() -> None:
    harness = Harness(max_num_seqs=4, max_num_batched_tokens=512)
    for step in range(2):
        for number in range(4):
            harness.add(f"{step}-{number}-0-0", 4)
    for number in range(30):
        harness.add(f"waiting-{number}-0-0", 4, max_tokens=1)
    assert len(fail(harness)) == 4
    assert fail(harness) == []
    harness.on_result = lambda result: result
    assert len(harness.step()) == 4 + 3, "the failures that were kept back, and the three beside the probe"
    assert harness.plans[-1].admitted[0].token_ids == [EOS]
    harness.run()


def test_requests_without_memory_say_nothing_of_the_device() -> None:
    harness = broken(3, 1)
    for number in range(4):
        harness.add(f"1-{number}-0-0", 4)
    harness.on_result = lambda result: unusable(0, 1, 2)(without_memory(3)(result))
    assert [delta.request_id for delta in harness.step()] == ["1-3-0-0"]
    with pytest.raises(EngineError, match="the last 6 requests"):
        fail(harness)


def test_a_row_in_the_middle_of_a_prompt_without_memory_fails_its_own_request() -> None:
    harness = Harness(max_num_seqs=4, max_num_batched_tokens=16)
    harness.add("short-0-0", 4, max_tokens=2)
    harness.add("long-0-0", 30)
    harness.on_result = without_memory(1)
    assert {delta.request_id: delta.failure for delta in harness.step()} == {"short-0-0": None, "long-0-0": NO_MEMORY}
    harness.on_result = lambda result: result
    harness.run()
    assert harness.streams["short-0-0"].finish_reason is FinishReason.LENGTH


def test_a_probe_without_memory_decides_nothing_and_is_not_waited_for() -> None:
    harness = broken(3, 1)
    for number in range(3):
        harness.add(f"1-{number}-0-0", 4)
    assert fail(harness) == []
    harness.on_result = without_memory(0)
    assert len(harness.step()) == 3
    assert not harness.scheduler.has_unfinished()


def test_sequences_of_one_request_are_no_evidence() -> None:
    harness = Harness(max_num_seqs=16, max_num_batched_tokens=512)
    for step in range(20):
        for number in range(4):
            harness.add(f"same-0-{number}", 4 + step)
        fail(harness)
    assert not harness.scheduler.has_unfinished()


@pytest.mark.parametrize("kind", ["adapter", "embeds"])
def test_numbers_from_outside_are_no_evidence_however_many_requests_bring_them(kind: str) -> None:
    harness = Harness(max_num_seqs=16, max_num_batched_tokens=512, max_adapters=1, max_adapters_on_host=1)
    for step in range(20):
        for number in range(4):
            request = make_request(f"{step}-{number}-0-0", 4, adapter=BROKEN if kind == "adapter" else None)
            embeds = PromptEmbeds("float32", bytes(16), bytes(4 * ROW_DIGEST_BYTES)) if kind == "embeds" else None
            assert harness.offer(replace(request, prompt_embeds=embeds)) is None
        if harness.plan() is None:  # the first needs the adapter in its slot
            for wait in harness.scheduler.take_adapter_loads():
                harness.worker.adapters[0] = BROKEN.digest
                harness.scheduler.on_adapter(wait, None)
        fail(harness)
    assert not harness.scheduler.has_unfinished()


def test_a_dead_device_shows_beside_requests_with_adapters() -> None:
    harness = Harness(max_num_seqs=16, max_num_batched_tokens=512, max_adapters=1, max_adapters_on_host=1)
    assert harness.offer(make_request("adapted-0-0", 4, adapter=BROKEN)) is None
    harness.plan()
    [wait] = harness.scheduler.take_adapter_loads()
    harness.worker.adapters[0] = BROKEN.digest
    harness.scheduler.on_adapter(wait, None)
    for number in range(2):
        harness.add(f"0-{number}-0-0", 4)
    fail(harness)
    for number in range(3):
        harness.add(f"1-{number}-0-0", 4)
    assert fail(harness) == []
    with pytest.raises(EngineError, match="the last 6 requests"):
        fail(harness)


def test_one_usable_value_refutes_it() -> None:
    harness = Harness(max_num_seqs=16, max_num_batched_tokens=512)
    harness.add("good-0-0", 4, max_tokens=30)
    harness.step()
    for step in range(20):
        for number in range(4):
            harness.add(f"{step}-{number}-0-0", 4)
        fail(harness, 1, 2, 3, 4)
    assert harness.scheduler.has_unfinished()
