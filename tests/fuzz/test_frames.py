"""Frames on an engine's socket: none ends the engine, and the next request is served."""

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.wire.channel import Channel, connect_dealer
from quire.core.wire.protocol import (
    AbortRequests,
    EngineOutput,
    EngineReady,
    EngineRequest,
    FinishReason,
    Grammar,
    Hello,
    PromptEmbeds,
    SequenceStart,
    StepOutputs,
    encoder,
)
from quire.core.wire.sampling_params import SamplingParams
from quire.frontend.launch.event_loop import EventLoopThread
from quire.frontend.launch.launcher import EngineLauncher
from tests.core.engine.null_engine import NULL_WORKER, engine_config
from tests.fuzz.examples import fuzzed, mutated

SAMPLING = SamplingParams(max_tokens=3, temperature=0)
VALID = [
    EngineRequest([SequenceStart("x", seed=1)], [1, 2, 3], SAMPLING),
    EngineRequest([SequenceStart("y", seed=1), SequenceStart("z", seed=2, output_token_ids=[4])], [1], SAMPLING),
    EngineRequest([SequenceStart("g", seed=1)], [1], SAMPLING, grammar=Grammar("xgrammar", b"k", b"d", "/nowhere")),
    EngineRequest([SequenceStart("e", seed=1)], [1], SAMPLING, prompt_embeds=PromptEmbeds("float32", b"", b"")),
    AbortRequests(["x"]),
]
FRAMES = st.one_of(
    st.lists(st.binary(max_size=40), max_size=3),
    st.sampled_from(VALID).flatmap(lambda message: mutated(encoder().encode(message))).map(lambda data: [data]),
)


class Peer:
    """A frontend that says anything to an engine whose workers have no model."""

    def __init__(self) -> None:
        self._launcher = EngineLauncher(engine_config(), worker_factory=NULL_WORKER)
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(EngineOutput)
        self._ready, self._ended = asyncio.Event(), dict[str, asyncio.Event]()
        self._numbers = itertools.count()
        self._channel: Channel | None = None

    async def open(self) -> None:
        self.engine = await self._launcher.launch()
        self._channel = connect_dealer(self.engine.address, self.engine.keys, self._on_frames)
        self._channel.send([encoder().encode(Hello())])
        async with asyncio.timeout(60):
            await self._ready.wait()

    def _on_frames(self, frames: list[bytes]) -> None:
        match self._decoder.decode(frames[0]):
            case EngineReady():
                self._ready.set()
            case StepOutputs() as outputs:
                for delta in outputs.deltas:
                    if delta.finish_reason is FinishReason.LENGTH and delta.request_id in self._ended:
                        self._ended[delta.request_id].set()

    async def say(self, frames: list[bytes]) -> None:
        """Sends frames, then a request, and waits until that is served."""
        assert self._channel is not None
        name = f"probe-{next(self._numbers)}"
        ended = self._ended[name] = asyncio.Event()
        self._channel.send(frames or [b""])
        probe = EngineRequest([SequenceStart(name, seed=1)], [1, 2], SAMPLING, priority=-(2**31))
        self._channel.send([encoder().encode(probe)])
        async with asyncio.timeout(30):
            await ended.wait()
        del self._ended[name]

    async def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self.engine.kill()
        self._launcher.close()


@pytest.fixture(scope="module")
def peer() -> Iterator[tuple[EventLoopThread, Peer]]:
    loop = EventLoopThread("fuzz")
    made = Peer()
    loop.run(made.open())
    yield loop, made
    loop.run(made.close())
    loop.close()


def test_an_engine_outlives_any_frame(peer: tuple[EventLoopThread, Peer]) -> None:
    loop, engine = peer

    @fuzzed(150)
    @given(FRAMES)
    def run(frames: list[bytes]) -> None:
        loop.run(engine.say(frames))

    run()
