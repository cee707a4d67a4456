"""Bulk work for one client is done in turns, so that other requests go on between them."""

import asyncio
import contextlib
import itertools
import os
import signal
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.core.errors import ParameterError
from quire.core.wire.sampling_params import SamplingParams
from quire.frontend.anthropic.schema import Message, MessagesRequest
from quire.frontend.anthropic.service import Messages
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.chat.conversation import Conversations
from quire.frontend.entry_store.access import LocalEntries
from quire.frontend.http.event_stream import ACCEPTED, Accepted
from quire.frontend.http.server_config import ServerConfig
from quire.frontend.http.server_state import ServerState
from quire.frontend.openai.batch_chat import BatchChat, BatchChatRequest
from quire.frontend.openai.chat import ChatCompletions
from quire.frontend.openai.completions import TextCompletions
from quire.frontend.openai.responses.background_responses import Makings
from quire.frontend.openai.responses.conversations import KeptConversations
from quire.frontend.openai.responses.jobs import Jobs
from quire.frontend.openai.responses.request_input import RequestReader
from quire.frontend.openai.responses.schema import ResponsesRequest
from quire.frontend.openai.responses.service import Opening, Responses
from quire.frontend.openai.responses.store import ResponseStore
from quire.frontend.openai.schema import ChatRequest, CompletionRequest
from quire.frontend.requests import time_slices
from quire.frontend.requests.merging import TASKS_PER_SLICE
from quire.frontend.requests.submission import Submission
from quire.frontend.requests.time_slices import SLICE_SECONDS, in_thread_if_long, in_time_slices

MANY = 3000
ITEMS_PER_TURN = 100
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns are as long as so many items, not as the machine's time: the clock goes on where it is read."""
    ticks = itertools.count(step=SLICE_SECONDS / ITEMS_PER_TURN)
    monkeypatch.setattr(time_slices, "time", SimpleNamespace(monotonic=lambda: next(ticks)))


class Neighbour:
    """Another task on the loop, which counts its turns, and measures a number's rise between two of them."""

    def __init__(self, watched: Callable[[], int] = int) -> None:
        self.num_turns = self.largest_rise = self.largest_fall = 0
        self._watched = watched
        self._task = asyncio.create_task(self._live())

    async def _live(self) -> None:
        last = self._watched()
        while True:
            self.num_turns += 1
            await asyncio.sleep(0)
            now = self._watched()
            self.largest_rise = max(self.largest_rise, now - last)
            self.largest_fall = max(self.largest_fall, last - now)
            last = now

    def leave(self) -> None:
        self._task.cancel()


def test_others_have_a_turn_when_some_items_took_long(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(time_slices, "time", clock)

    async def run() -> list[int]:
        neighbour, seen = Neighbour(), []
        async for _ in in_time_slices(range(4)):
            clock.now += 1.1 * SLICE_SECONDS
            seen.append(neighbour.num_turns)
        neighbour.leave()
        return seen

    assert asyncio.run(run()) == [0, 1, 2, 3]


def test_others_have_a_turn_after_so_many_items() -> None:
    async def run() -> list[int]:
        neighbour, seen = Neighbour(), []
        async for _ in in_time_slices(range(6), seconds=60, most=2):
            seen.append(neighbour.num_turns)
        neighbour.leave()
        return seen

    assert asyncio.run(run()) == [0, 0, 1, 1, 2, 2]


def test_quick_items_are_not_held_up() -> None:
    async def run() -> tuple[list[int], int]:
        neighbour = Neighbour()
        items = [item async for item in in_time_slices(range(100), seconds=60)]
        neighbour.leave()
        return items, neighbour.num_turns

    assert asyncio.run(run()) == (list(range(100)), 0)


def test_long_work_is_done_in_a_thread_and_short_work_here() -> None:
    async def run() -> tuple[int, int]:
        return await in_thread_if_long(threading.get_ident, is_long=True), await in_thread_if_long(
            threading.get_ident, is_long=False
        )

    thread, here = asyncio.run(run())
    assert here == threading.get_ident() != thread


class Server:
    """The services of one model, whose engine is real."""

    def __init__(self, llm: AsyncLLM) -> None:
        config = ServerConfig()
        conversations = Conversations(llm, config)
        self.llm = llm
        self.text = TextCompletions(llm, config, conversations)
        self.chat = ChatCompletions(llm, config, conversations)
        self.batch = BatchChat(self.chat)
        self.messages = Messages(llm.model, conversations)
        makings = Makings()
        store = ResponseStore(
            LocalEntries(config.entry_store()),
            makings,
            max_entries=config.max_stored_responses,
            max_bytes=config.max_stored_response_bytes,
        )
        jobs = Jobs(llm, store, makings, KeptConversations(store), ServerState(), tokens_as_ids=False)
        self.responses = Responses(llm, conversations, store, RequestReader(store), jobs)

    @contextlib.contextmanager
    def standing(self) -> Iterator[None]:
        """No request ends by itself here, however slow the machine is: the engine's process is stopped meanwhile."""
        assert self.llm.client.engine_pids[0]
        os.kill(self.llm.client.engine_pids[0], signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.llm.client.engine_pids[0], signal.SIGCONT)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def server(checkpoint: Callable[..., Path], runner: asyncio.Runner) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_ENGINE_HEARTBEAT_TIMEOUT_S", "600")  # a stopped engine is silent
        llm = AsyncLLM.from_engine_args(model=str(checkpoint("llama")), num_gpu_blocks_override=512, max_num_seqs=64)
        runner.run(llm.start())
    yield Server(llm)
    runner.run(llm.aclose())


def test_streams_begin_when_their_requests_are_accepted(server: Server, runner: asyncio.Runner) -> None:
    """Headers may be sent before the first event, but not before the request is accepted: it may still be refused."""

    async def begin(frames: AsyncGenerator[Any, None]) -> Any:
        first = await anext(frames)
        assert server.llm.num_unfinished == 1
        await frames.aclose()
        assert server.llm.num_unfinished == 0
        return first

    async def run() -> list[Any]:
        hello = [Message(role="user", content="Hello")]
        streams = [
            server.text.stream(CompletionRequest(prompt="Hello", max_tokens=9, stream=True)),
            server.chat.stream(ChatRequest(messages=HELLO, max_tokens=9, stream=True)),
            server.messages.stream(MessagesRequest(model=server.llm.model.name, messages=hello, max_tokens=9)),
            server.responses.stream(ResponsesRequest(input="Hello", max_output_tokens=9, stream=True)),
        ]
        return [await begin(frames) for frames in streams]

    with server.standing():
        text, chat, message, response = runner.run(run())
        assert text == ACCEPTED
        assert isinstance(chat, Accepted)
        assert b'"role":"assistant"' in chat
        assert isinstance(message, Accepted)
        assert message.startswith(b"event: message_start\n")
        assert isinstance(response, Opening)
        assert b"".join(response).startswith(b"event: response.created\n")


def test_many_sequences_of_a_request_are_opened_between_turns_of_others(server: Server, runner: asyncio.Runner) -> None:
    async def run() -> Neighbour:
        neighbour = Neighbour()
        stream = await server.llm.open_stream(
            Submission("a", SamplingParams(n=MANY, max_tokens=1500, ignore_eos=True), "many")
        )
        assert server.llm.client.num_unfinished == MANY
        neighbour.leave()
        stream.close()
        return neighbour

    with server.standing():
        neighbour = runner.run(run())
    assert neighbour.num_turns >= MANY / ITEMS_PER_TURN - 1


def test_many_prompts_of_a_request_are_opened_between_turns_of_others(server: Server, runner: asyncio.Runner) -> None:
    async def run() -> Neighbour:
        neighbour = Neighbour(lambda: server.llm.num_unfinished)
        request = CompletionRequest(prompt=["a"] * MANY, max_tokens=1500, ignore_eos=True, stream=True)
        frames = server.text.stream(request)
        await anext(frames)
        assert server.llm.num_unfinished == MANY
        await frames.aclose()
        assert server.llm.num_unfinished == 0
        neighbour.leave()
        return neighbour

    with server.standing():
        neighbour = runner.run(run())
    assert neighbour.largest_rise < 2 * ITEMS_PER_TURN
    assert neighbour.largest_fall < 2 * ITEMS_PER_TURN


def test_many_conversations_begin_one_a_turn_and_end_a_few_a_turn(server: Server, runner: asyncio.Runner) -> None:
    async def run() -> Neighbour:
        neighbour = Neighbour(lambda: server.llm.num_unfinished)
        request = BatchChatRequest(messages=[HELLO] * 300, max_tokens=1500, ignore_eos=True)
        answer = asyncio.create_task(server.batch.complete(request))
        while server.llm.num_unfinished < 300:
            await asyncio.sleep(0)
        answer.cancel()
        await asyncio.gather(answer, return_exceptions=True)
        neighbour.leave()
        return neighbour

    with server.standing():
        neighbour = runner.run(run())
    assert neighbour.largest_rise == 1
    assert neighbour.largest_fall <= TASKS_PER_SLICE
    assert server.llm.num_unfinished == 0


def test_each_conversation_has_its_choice(server: Server, runner: asyncio.Runner) -> None:
    answer = runner.run(server.batch.complete(BatchChatRequest(messages=[HELLO] * 100, max_tokens=1)))
    assert [choice.index for choice in answer.choices] == list(range(100))
    assert answer.usage.completion_tokens == 100


def test_conversations_after_one_that_is_refused_are_not_opened(server: Server, runner: asyncio.Runner) -> None:
    async def run() -> int:
        neighbour = Neighbour()
        with pytest.raises(ParameterError, match="with a role"):
            await server.batch.complete(BatchChatRequest(messages=[HELLO, [{}], *[HELLO] * 200], max_tokens=1))
        neighbour.leave()
        return neighbour.num_turns

    assert runner.run(run()) < 50
    assert server.llm.num_unfinished == 0


def test_request_that_is_aborted_while_it_is_opened_ends(server: Server, runner: asyncio.Runner) -> None:
    async def run() -> list[str | None]:
        async def abort() -> None:
            while not server.llm.num_unfinished:
                await asyncio.sleep(0)
            await server.llm.abort("many")

        aborting = asyncio.create_task(abort())
        stream = await server.llm.open_stream(Submission("a", SamplingParams(n=MANY, max_tokens=1), "many"))
        await aborting
        outputs = [output async for output in stream]
        return [each.finish_reason for each in outputs[-1].outputs]

    reasons = runner.run(run())
    assert len(reasons) == MANY
    assert "abort" in reasons
    assert server.llm.num_unfinished == server.llm.client.num_unfinished == 0
