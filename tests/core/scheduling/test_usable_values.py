"""When unusable values are the device's fault, and not that of a request."""

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from quire.core.errors import EngineError
from quire.core.wire.adapters import Adapter
from quire.core.wire.protocol import ROW_DIGEST_BYTES, PromptEmbeds, StepResult
from quire.core.wire.row_outputs import RequestFailure
from tests.core.scheduling.fake_worker import Harness, make_request

BROKEN = Adapter("broken", "/broken", b"broken")
NAN = RequestFailure("internal", "NaN", may_pass=True)


def unusable(*rows: int) -> Callable[[StepResult], StepResult]:
    """Makes these rows of a result unusable; all rows, if there are none."""

    def change(result: StepResult) -> StepResult:
        result.outputs += [(row, NAN) for row in rows or range(len(result.token_ids))]
        return result

    return change


def fail(harness: Harness, *rows: int) -> None:
    """One step whose rows are unusable."""
    harness.on_result = unusable(*rows)
    harness.step()


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
    with pytest.raises(EngineError, match="NaN or infinite for each of the last 3 requests"):
        fail(harness)
    assert harness.scheduler.has_unfinished()


def test_requests_that_fail_one_after_another_are_it_at_last() -> None:
    harness = broken(1, 7)
    harness.add("8-0-0-0", 4)
    with pytest.raises(EngineError, match="the last 8 requests"):
        fail(harness)


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
