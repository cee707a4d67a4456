"""Loads of adapters beside the steps: whom their ends concern."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from quire.core.engine.adapter_loads import AdapterLoads
from quire.core.errors import EngineError, UnavailableError, WorkerCallError
from quire.core.wire.adapters import Adapter, LoadedAdapter
from quire.core.wire.protocol import RequestDelta
from quire.core.wire.row_outputs import RequestFailure
from quire.frontend.requests.failures import error_of
from tests.core.scheduling.fake_worker import Harness, make_request

ADAPTER = Adapter("name", "/folder", b"digest")


def waiting() -> Harness:
    """A scheduler with a request that waits for an adapter."""
    harness = Harness(max_adapters=1, max_adapters_on_host=1)
    assert harness.offer(make_request("a", 4, adapter=ADAPTER)) is None
    harness.plan()
    return harness


def answering(answer: LoadedAdapter | Exception) -> Callable[[str, bytes], Awaitable[list[bytes]]]:
    async def call(name: str, payload: bytes) -> list[bytes]:
        if isinstance(answer, Exception):
            raise answer
        return [msgspec.msgpack.encode(answer)]

    return call


async def load(harness: Harness, answer: LoadedAdapter | Exception) -> list[RequestDelta]:
    """The deltas of a load that ends so."""
    ends: list[RequestDelta] = []
    loads = AdapterLoads(harness.scheduler, answering(answer), ends.extend)
    loads.start()
    for _ in range(3):
        await asyncio.sleep(0)
    return ends


def test_requests_outlive_an_engine_that_ends_while_it_loads_their_adapter() -> None:
    harness = waiting()
    assert asyncio.run(load(harness, EngineError("worker 0 ended"))) == []
    assert harness.scheduler.has_unfinished()  # the next engine gets it


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (LoadedAdapter("no such layer"), "no such layer"),
        (WorkerCallError("no such layer"), "no such layer"),
        (LoadedAdapter("/folder has no b; see '/folder/a'."), "its folder has no b; see 'a'."),
    ],
)
def test_requests_end_with_a_load_that_fails(answer: LoadedAdapter | Exception, why: str) -> None:
    """The clients are not told where the adapter is."""
    harness = waiting()
    [delta] = asyncio.run(load(harness, answer))
    assert delta.failure is not None
    assert delta.failure.kind == "invalid"
    assert delta.failure.message == f"The adapter 'name' cannot be used: {why}"
    assert not harness.scheduler.has_unfinished()


def test_requests_may_come_again_after_files_that_come_late() -> None:
    [delta] = asyncio.run(load(waiting(), LoadedAdapter("the files were not read in 1 s.", is_late=True)))
    assert delta.failure is not None
    error = error_of(delta.failure, None)
    assert isinstance(error, UnavailableError)
    assert error.retry_after_seconds > 0
    assert str(error).startswith("The adapter 'name' is not loaded: the files were not read in 1 s. Try again later")


def test_preparing_an_adapter_tells_its_faults_from_the_engines() -> None:
    async def prepare(answer: LoadedAdapter | Exception) -> RequestFailure | None:
        harness = Harness(max_adapters=1, max_adapters_on_host=1)
        return await AdapterLoads(harness.scheduler, answering(answer), lambda deltas: None).prepare(ADAPTER)

    assert asyncio.run(prepare(LoadedAdapter())) is None
    failure = asyncio.run(prepare(LoadedAdapter("no such layer")))
    assert failure is not None
    assert "no such layer" in failure.message
    with pytest.raises(EngineError, match="worker 0 ended"):
        asyncio.run(prepare(EngineError("worker 0 ended")))
