"""Times that an engine on another host tells, whose clock began with that host."""

import time

import pytest

from quire.core.engine.client import EngineClient
from quire.core.errors import HostLostError
from quire.core.wire.protocol import EngineRequest, RequestDelta, SchedulerStats, SequenceStart, StepOutputs
from quire.core.wire.sampling_params import SamplingParams
from quire.frontend.launch.launcher import EngineLauncher
from tests.core.engine.null_engine import engine_config


@pytest.mark.parametrize("ahead", [8e6, -8e6])
def test_times_of_an_engine_on_another_host_are_told_by_this_hosts_clock(ahead: float) -> None:
    client = EngineClient([EngineLauncher(engine_config())], num_slots=8)
    [engine] = client._fleet.engines
    deltas: list[RequestDelta] = []
    starts = [SequenceStart(name, seed=0) for name in ("a", "b", "c")]
    client.submit(EngineRequest(starts, [1], SamplingParams()), [deltas.append] * 3)

    def say(seconds_ago: float, *deltas: RequestDelta) -> None:
        """A message that was sent so long ago."""
        message = StepOutputs(list(deltas), SchedulerStats(), time.monotonic() + ahead - seconds_ago)
        client.on_message(engine, message)

    say(0.0)
    now = time.monotonic()
    delta = RequestDelta("a", [7], queued_at=now + ahead - 5.0, scheduled_at=now + ahead - 3.0)
    say(2.0, delta, RequestDelta("b", []))  # it was under way for longer
    assert [each.queued_at for each in deltas] == [pytest.approx(now - 5.0, abs=1.0), 0.0]
    assert [each.scheduled_at for each in deltas] == [pytest.approx(now - 3.0, abs=1.0), 0.0]
    client.on_crash(engine, HostLostError("the host is gone"))
    ahead += 1e6
    say(0.0, RequestDelta("c", [7], queued_at=now + ahead - 1.0))
    assert deltas[-1].queued_at == pytest.approx(now - 1.0, abs=1.0)
