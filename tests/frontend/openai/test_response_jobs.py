"""The beginnings and ends of responses: one id for one response, and nothing that is made for ever."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.core.errors import ParameterError
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.chat.conversation import Conversations
from quire.frontend.entry_store.access import LocalEntries
from quire.frontend.entry_store.store import Entry, Put, Replaces
from quire.frontend.http.server_config import ServerConfig
from quire.frontend.http.server_state import ServerState
from quire.frontend.openai.responses.answers import Response
from quire.frontend.openai.responses.background_responses import Makings
from quire.frontend.openai.responses.conversations import KeptConversations
from quire.frontend.openai.responses.jobs import Jobs
from quire.frontend.openai.responses.request_input import RequestReader
from quire.frontend.openai.responses.schema import ResponsesRequest
from quire.frontend.openai.responses.service import Responses
from quire.frontend.openai.responses.store import ResponseStore
from quire.frontend.openai.responses.stored import StoredResponse

BODY: dict[str, Any] = {"input": "Hi", "max_output_tokens": 2, "request_id": "mine"}
ENDLESS = BODY | {"max_output_tokens": 1500, "ignore_eos": True, "background": True}


class Contested(LocalEntries):
    """Another server of the command may put an entry just before this one does, for which the id was free."""

    rival: Entry | None = None

    async def put(self, entry: Entry, *, replaces: Replaces = "anything") -> Put:
        if self.rival is not None:
            await super().put(self.rival)
            self.rival = None
        return await super().put(entry, replaces=replaces)


class Service:
    """The services of one server.

    Attributes:
        store: the entries of the command.
        entries: how this server reaches them.
    """

    def __init__(self, engine: AsyncLLM) -> None:
        config = ServerConfig()
        self.engine = engine
        self.store = config.entry_store()
        self.entries = Contested(self.store)
        self.state = ServerState()
        makings = Makings()
        store = ResponseStore(
            self.entries,
            makings,
            max_entries=config.max_stored_responses,
            max_bytes=config.max_stored_response_bytes,
        )
        jobs = Jobs(engine, store, makings, KeptConversations(store), self.state, tokens_as_ids=False)
        self.responses = Responses(engine, Conversations(engine, config), store, RequestReader(store), jobs)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def engine(checkpoint: Callable[..., Path], runner: asyncio.Runner) -> Iterator[AsyncLLM]:
    engine = AsyncLLM.from_engine_args(model=str(checkpoint("llama")), device="cpu")
    runner.run(engine.start())
    yield engine
    runner.run(engine.aclose())


@pytest.fixture
def service(engine: AsyncLLM) -> Service:
    return Service(engine)


async def begin(service: Service, **fields: Any) -> None:
    """A response by each of the ways in which there are some."""
    request = ResponsesRequest(**BODY | fields)
    if not request.stream:
        await service.responses.create(request)
        return
    async for _ in service.responses.stream(request):
        pass


def of_another_server() -> Entry:
    response = Response(id="resp_mine", created_at=0, model="m", status="in_progress", background=True)
    return StoredResponse(response=response, items=[], num_input_items=0).entry(1, maker=7)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_an_id_that_another_server_has_taken_meanwhile_is_refused(
    service: Service, runner: asyncio.Runner, background: bool, stream: bool
) -> None:
    """Both servers found the id free when they looked."""

    async def run() -> None:
        service.entries.rival = of_another_server()
        with pytest.raises(ParameterError, match="is taken"):
            await begin(service, background=background, stream=stream)
        while service.engine.num_unfinished:
            await asyncio.sleep(0.01)
        assert service.state.num_in_flight == 0

    runner.run(run())
    assert service.store.find("resp_mine") == of_another_server()


def test_a_response_that_is_cancelled_as_soon_as_its_id_is_known_is_ended(
    service: Service, runner: asyncio.Runner
) -> None:
    async def run() -> None:
        made = await service.responses.create(ResponsesRequest(**ENDLESS))
        assert (await service.responses.cancel(made.id)).status == "cancelled"
        assert (await service.responses.retrieve(made.id)).status == "cancelled"

    runner.run(run())
    assert service.store.num_in_making == 0
    assert service.engine.num_unfinished == 0


def test_a_server_that_stops_as_a_response_begins_leaves_nothing_of_it(
    service: Service, runner: asyncio.Runner
) -> None:
    async def run() -> None:
        beginning = asyncio.create_task(begin(service, **ENDLESS))
        while not service.state.num_in_flight:
            await asyncio.sleep(0)
        service.state.stop()
        await asyncio.wait([beginning])
        while service.state.num_in_flight:
            await asyncio.sleep(0)

    runner.run(run())
    assert service.store.num_in_making == 0
    assert service.engine.num_unfinished == 0
