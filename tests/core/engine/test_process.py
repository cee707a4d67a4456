"""An engine process's inbox, in this process and over a real socket."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from quire.core.engine.process import EngineProcess
from quire.core.wire.channel import Channel, connect_dealer
from quire.core.wire.protocol import (
    DropGrammars,
    EngineOutput,
    EngineReady,
    EngineRequest,
    Grammar,
    Hello,
    SequenceStart,
    StepOutputs,
    encoder,
)
from quire.core.wire.sampling_params import SamplingParams
from quire.executor.processes.uniproc import UniProcExecutor
from tests.core.engine.null_engine import NULL_WORKER, engine_config

T = TypeVar("T")

REQUEST = encoder().encode(EngineRequest([SequenceStart("a", seed=1)], [1, 2, 3], SamplingParams(max_tokens=4)))
HELLO = encoder().encode(Hello())
TWO = [SequenceStart("a_0", seed=1), SequenceStart("a_1", seed=2)]


class Frontend:
    """One end of the engine's socket."""

    def __init__(self, address: str) -> None:
        self.heard: asyncio.Queue[EngineOutput] = asyncio.Queue()
        decoder = msgspec.msgpack.Decoder(EngineOutput)
        self.channel: Channel = connect_dealer(
            address, None, lambda frames: self.heard.put_nowait(decoder.decode(frames[0]))
        )

    async def hears(self, kind: type[T]) -> T:
        while not isinstance(heard := await self.heard.get(), kind):
            pass
        return heard


@asynccontextmanager
async def engine(tmp_path: Path) -> AsyncIterator[tuple[EngineProcess, Frontend]]:
    """An engine that is ready, and a frontend that has heard so."""
    address, config = f"ipc://{tmp_path}/engine.sock", engine_config()
    process = EngineProcess(config, UniProcExecutor(config, factory=NULL_WORKER), address, None)
    running, frontend = asyncio.create_task(process.run()), Frontend(address)
    async with asyncio.timeout(60):
        frontend.channel.send([HELLO])
        await frontend.hears(EngineReady)
        yield process, frontend
        process.close()
        assert await running == 0
        frontend.channel.close()


def test_a_message_that_cannot_be_read_is_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with engine(tmp_path) as (_, frontend):
            for frames in ([b"what"], [HELLO, HELLO], [REQUEST]):
                frontend.channel.send(frames)
            await frontend.hears(StepOutputs)

    asyncio.run(scenario())
    assert caplog.text.count("dropping a message that cannot be decoded") == 2
    assert "Traceback" not in caplog.text


def failing(heard: StepOutputs) -> dict[str, str]:
    """The sequences that have failed, and why."""
    return {delta.request_id: delta.failure.message for delta in heard.deltas if delta.failure is not None}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"ignore_eos": "yes"}, "Expected `bool`, got `str`"),
        ({"max_tokens": 4.5}, "Expected `int | null`, got `float`"),
    ],
    ids=["flag", "count"],
)
def test_a_request_that_cannot_be_read_fails(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    """Its frontend hears so at once for each sequence; other requests go on."""
    raw = msgspec.msgpack.decode(encoder().encode(EngineRequest(TWO, [1, 2, 3], SamplingParams(max_tokens=4))))
    raw[3] |= change

    async def scenario() -> None:
        async with engine(tmp_path) as (_, frontend):
            frontend.channel.send([msgspec.msgpack.encode(raw)])
            failed = failing(await frontend.hears(StepOutputs))
            assert set(failed) == {"a_0", "a_1"}
            assert all(reason in message for message in failed.values())
            frontend.channel.send([REQUEST])
            assert not failing(await frontend.hears(StepOutputs))

    asyncio.run(scenario())


def test_a_request_whose_grammar_was_lost_fails(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with engine(tmp_path) as (_, frontend):
            grammar = Grammar("xgrammar", b"key", b"", "/nowhere")  # as if an earlier message had brought its data
            request = EngineRequest(TWO, [1, 2, 3], SamplingParams(max_tokens=4), grammar=grammar)
            frontend.channel.send([encoder().encode(request)])
            failed = failing(await frontend.hears(StepOutputs))
            assert set(failed) == {"a_0", "a_1"}
            assert "the message with its grammar could not be read" in failed["a_0"]
            for message in (encoder().encode(DropGrammars([b"key"])), REQUEST):
                frontend.channel.send([message])
            assert not failing(await frontend.hears(StepOutputs))

    asyncio.run(scenario())


def test_what_a_frontend_has_left_behind_is_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its messages may be read after it was found gone."""

    async def scenario() -> None:
        async with engine(tmp_path) as (process, frontend):
            [identity] = process._frontends
            process._forget(identity)
            for message in (REQUEST, encoder().encode(DropGrammars([b"forgotten with it"])), HELLO):
                frontend.channel.send([message])
            await frontend.hears(EngineReady)  # so the others have been read
            assert not process._owners

    asyncio.run(scenario())
    assert "Traceback" not in caplog.text
