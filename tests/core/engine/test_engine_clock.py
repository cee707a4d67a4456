"""Times that an engine on another host tells, whose clock began with that host."""

import time

import pytest

from quire.core.engine.engine_link import EngineLink
from quire.core.engine.restart_policy import RestartPolicy
from quire.core.wire.protocol import EngineReady, RequestDelta, SchedulerStats, StepOutputs
from quire.frontend.launch.launcher import EngineLauncher
from tests.core.engine.null_engine import engine_config


class User:
    """See `LinkUser`: keeps the deltas."""

    def __init__(self) -> None:
        self.deltas: list[RequestDelta] = []
        self.on_deltas = self.deltas.extend

    def on_stats(self, link: EngineLink, stats: SchedulerStats) -> None: ...

    def on_ready(self, link: EngineLink, ready: EngineReady) -> None: ...

    def on_crash(self, link: EngineLink, end: Exception) -> None: ...

    def on_dead(self, link: EngineLink, error: Exception) -> None: ...


@pytest.mark.parametrize("ahead", [8e6, -8e6])
def test_times_of_an_engine_on_another_host_are_told_by_this_hosts_clock(ahead: float) -> None:
    user = User()
    link = EngineLink(0, EngineLauncher(engine_config()), user, RestartPolicy())

    def say(seconds_ago: float, *deltas: RequestDelta) -> None:
        """A message that was sent so long ago."""
        message = StepOutputs(list(deltas), SchedulerStats(), time.monotonic() + ahead - seconds_ago)
        link.on_message(link.engine, message)

    say(0.0)
    now = time.monotonic()
    delta = RequestDelta("a", [7], queued_at=now + ahead - 5.0, scheduled_at=now + ahead - 3.0)
    say(2.0, delta, RequestDelta("b", []))  # it was under way for longer
    assert [each.queued_at for each in user.deltas] == [pytest.approx(now - 5.0, abs=1.0), 0.0]
    assert [each.scheduled_at for each in user.deltas] == [pytest.approx(now - 3.0, abs=1.0), 0.0]
    link.on_crash(link.engine, RuntimeError("the host is gone"))
    ahead += 1e6
    say(0.0, RequestDelta("c", [7], queued_at=now + ahead - 1.0))
    assert user.deltas[-1].queued_at == pytest.approx(now - 1.0, abs=1.0)
