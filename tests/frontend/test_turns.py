"""What one client asks for in bulk is done a little at a time, and everything else has its turns between."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire.core.errors import ParameterError
from quire.core.sampling_params import SamplingParams
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.openai.batch_chat import BatchChat, BatchChatRequest
from quire.frontend.openai.chat import ChatCompletions
from quire.frontend.openai.completions import TextCompletions
from quire.frontend.openai.conversation import Conversations
from quire.frontend.openai.models import ServedModels
from quire.frontend.openai.schema import CompletionRequest
from quire.frontend.server_config import ServerConfig
from quire.frontend.turns import TURN_SECONDS, apart, in_turns

MANY = 2000
HELLO = [{"role": "user", "content": "Hello"}]


class Neighbour:
    """Somebody else on the loop, who counts the turns that it gets."""

    def __init__(self) -> None:
        self.num_turns = 0
        self._task = asyncio.create_task(self._live())

    async def _live(self) -> None:
        while True:
            self.num_turns += 1
            await asyncio.sleep(0)

    def leave(self) -> None:
        self._task.cancel()


def test_others_have_a_turn_when_some_items_took_long() -> None:
    async def run() -> list[int]:
        neighbour, turns = Neighbour(), []
        async for _ in in_turns(range(4)):
            time.sleep(1.1 * TURN_SECONDS)
            turns.append(neighbour.num_turns)
        neighbour.leave()
        return turns

    assert asyncio.run(run()) == [0, 1, 2, 3]


def test_others_have_a_turn_after_so_many_items() -> None:
    async def run() -> list[int]:
        neighbour, turns = Neighbour(), []
        async for _ in in_turns(range(6), seconds=60, most=2):
            turns.append(neighbour.num_turns)
        neighbour.leave()
        return turns

    assert asyncio.run(run()) == [0, 0, 1, 1, 2, 2]


def test_quick_items_are_not_held_up() -> None:
    async def run() -> tuple[list[int], int]:
        neighbour = Neighbour()
        items = [item async for item in in_turns(range(100), seconds=60)]
        neighbour.leave()
        return items, neighbour.num_turns

    assert asyncio.run(run()) == (list(range(100)), 0)


def test_long_work_is_done_in_a_thread_and_short_work_here() -> None:
    async def run() -> tuple[int, int]:
        return await apart(threading.get_ident, is_long=True), await apart(threading.get_ident, is_long=False)

    thread, here = asyncio.run(run())
    assert here == threading.get_ident() != thread


class Server:
    """The services of one model, whose engine is real."""

    def __init__(self, llm: AsyncLLM) -> None:
        config, models = ServerConfig(), ServedModels(llm)
        conversations = Conversations(llm, config)
        self.llm = llm
        self.text = TextCompletions(llm, config, models, conversations)
        self.batch = BatchChat(ChatCompletions(llm, config, models, conversations))


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def server(checkpoint: Callable[..., Path], runner: asyncio.Runner) -> Iterator[Server]:
    llm = AsyncLLM.from_engine_args(model=str(checkpoint("llama")), num_gpu_blocks_override=512, max_num_seqs=64)
    runner.run(llm.start())
    yield Server(llm)
    runner.run(llm.aclose())


async def open_many(llm: AsyncLLM) -> int:
    neighbour = Neighbour()
    stream = await llm.open("a", SamplingParams(n=MANY, max_tokens=1), "many")
    neighbour.leave()
    stream.close()
    return neighbour.num_turns


def test_many_sequences_of_a_request_are_opened_between_turns_of_others(server: Server, runner: asyncio.Runner) -> None:
    assert runner.run(open_many(server.llm)) > 5


def test_many_prompts_of_a_request_are_opened_between_turns_of_others(server: Server, runner: asyncio.Runner) -> None:
    async def run() -> tuple[int, int]:
        neighbour, texts = Neighbour(), server.text
        frames = texts.stream(CompletionRequest(prompt=["a"] * MANY, max_tokens=1, stream=True))
        await anext(frames)
        num_turns = neighbour.num_turns
        neighbour.leave()
        await frames.aclose()
        return num_turns, server.llm.num_unfinished

    num_turns, num_left = runner.run(run())
    assert num_turns > 5
    assert num_left == 0


def test_many_conversations_have_a_turn_each(server: Server, runner: asyncio.Runner) -> None:
    async def run() -> tuple[int, int]:
        neighbour = Neighbour()
        answer = await server.batch.complete(BatchChatRequest(messages=[HELLO] * 200, max_tokens=1))
        neighbour.leave()
        return neighbour.num_turns, len(answer.choices)

    num_turns, num_choices = runner.run(run())
    assert num_turns > 200
    assert num_choices == 200


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
        stream = await server.llm.open("a", SamplingParams(n=MANY, max_tokens=1), "many")
        await aborting
        outputs = [output async for output in stream]
        return [each.finish_reason for each in outputs[-1].outputs]

    reasons = runner.run(run())
    assert len(reasons) == MANY
    assert "abort" in reasons
    assert server.llm.num_unfinished == server.llm.client.num_unfinished == 0
