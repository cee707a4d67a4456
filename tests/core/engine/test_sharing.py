"""The shared parts of a request's sequences are sent to the engine once, and stay one object there."""

import asyncio
import os
import signal
from collections.abc import Sequence

import msgspec
import pytest
from msgspec.structs import replace

from quire.core.engine.client import EngineClient
from quire.core.engine.sent_grammars import SentGrammars
from quire.core.wire import protocol
from quire.core.wire.channel import Channel
from quire.core.wire.protocol import EngineRequest, FinishReason, Grammar, RequestDelta, SequenceStart
from quire.core.wire.sampling_params import SamplingParams
from quire.frontend.launch.launcher import EngineLauncher
from tests.core.engine.null_engine import NULL_WORKER, client_of, engine_config
from tests.core.scheduling.fake_worker import Harness, alone, make_request

MANY = 64
GRAMMAR = Grammar("guidance", b"one", os.urandom(2**20), "nowhere")


class Sequences:
    """Submits a request and collects the deltas of its sequences."""

    def __init__(self, client: EngineClient, request: EngineRequest) -> None:
        ids = [start.request_id for start in request.sequences]
        self.token_ids: dict[str, list[int]] = {request_id: [] for request_id in ids}
        self.ends: dict[str, RequestDelta] = {}
        client.submit(request, [self._on_delta] * len(ids))

    def _on_delta(self, delta: RequestDelta) -> None:
        self.token_ids[delta.request_id] += delta.token_ids
        if delta.finish_reason is not None:
            self.ends[delta.request_id] = delta

    async def until(self, num_ended: int) -> None:
        async with asyncio.timeout(60):
            while len(self.ends) < num_ended:
                await asyncio.sleep(0.01)


class Sent:
    """What a frontend has sent, by way of watching its socket."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.messages: list[protocol.EngineInput] = []
        self.num_bytes = 0
        send = Channel.send

        def watch(channel: Channel, frames: Sequence[bytes]) -> None:
            self.num_bytes += sum(map(len, frames))
            self.messages.append(msgspec.msgpack.decode(frames[0], type=protocol.EngineInput))
            send(channel, frames)

        monkeypatch.setattr(Channel, "send", watch)

    def take(self) -> tuple[list[protocol.EngineInput], int]:
        taken = self.messages, self.num_bytes
        self.messages, self.num_bytes = [], 0
        return taken


def request_of(
    n: int, prompt_len: int = 3, max_tokens: int = 5, name: str = "r", grammar: Grammar | None = None
) -> EngineRequest:
    starts = [SequenceStart(f"{name}_{index}", seed=index) for index in range(n)]
    prompt = list(range(1, 1 + prompt_len))
    return EngineRequest(starts, prompt, SamplingParams(max_tokens=max_tokens), grammar=grammar)


def test_n_sequences_cost_about_the_bytes_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        config = engine_config(max_model_len=20_000)
        config = replace(config, limits=replace(config.limits, max_num_queued_reqs=None))
        sent = Sent(monkeypatch)
        async with client_of(EngineLauncher(config, worker_factory=NULL_WORKER)) as client:
            await client.start()
            num_bytes = {}
            for n in (1, MANY):
                sent.take()
                sequences = Sequences(client, request_of(n, prompt_len=10_000, grammar=GRAMMAR))
                _, num_bytes[n] = sent.take()
                await sequences.until(n)
                assert {end.finish_reason for end in sequences.ends.values()} == {FinishReason.LENGTH}
            assert num_bytes[1] > len(GRAMMAR.data) + 10_000
            assert num_bytes[MANY] - num_bytes[1] < 20 * MANY

    asyncio.run(scenario())


def test_requests_with_equal_grammars_bring_it_once_and_the_last_one_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        sent = Sent(monkeypatch)
        config = engine_config(max_model_len=10_000)
        async with client_of(EngineLauncher(config, worker_factory=NULL_WORKER)) as client:
            await client.start()
            sent.take()
            lasting = Sequences(client, request_of(1, max_tokens=9000, name="lasting", grammar=GRAMMAR))
            for index in range(4):
                await Sequences(client, request_of(2, name=str(index), grammar=GRAMMAR)).until(2)
            messages, num_bytes = sent.take()
            assert [type(message) for message in messages] == [EngineRequest] * 5
            assert num_bytes < len(GRAMMAR.data) + 2000
            client.abort(list(lasting.token_ids))
            assert sent.take()[0] == [protocol.AbortRequests(["lasting_0"]), protocol.DropGrammars([GRAMMAR.key])]
            again = Sequences(client, request_of(1, name="again", grammar=GRAMMAR))
            [message] = sent.take()[0]
            assert isinstance(message, EngineRequest)
            assert message.grammar == GRAMMAR
            await again.until(1)

    asyncio.run(scenario())


def test_one_sequence_that_is_aborted_leaves_the_others() -> None:
    async def scenario() -> None:
        async with client_of(EngineLauncher(engine_config(), worker_factory=NULL_WORKER)) as client:
            await client.start()
            sequences = Sequences(client, request_of(4, max_tokens=200, grammar=GRAMMAR))
            client.abort(["r_1"])
            await sequences.until(3)
            assert {name: len(tokens) for name, tokens in sequences.token_ids.items() if name != "r_1"} == {
                "r_0": 200, "r_2": 200, "r_3": 200,
            }  # fmt: skip
            assert "r_1" not in sequences.ends
            assert client.num_unfinished == 0

    asyncio.run(scenario())


def test_sequences_that_the_queue_has_no_room_for_are_refused_alone() -> None:
    async def scenario() -> None:
        async with client_of(EngineLauncher(engine_config(), worker_factory=NULL_WORKER)) as client:
            await client.start()
            sequences = Sequences(client, request_of(30))  # 8 slots, and 16 may wait
            await sequences.until(30)
            kinds = [end.failure.kind if end.failure else None for _, end in sorted(sequences.ends.items())]
            assert (kinds.count(None), kinds.count("overloaded")) == (24, 6)

    asyncio.run(scenario())


def test_a_crash_in_the_middle_resumes_all_unfinished_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        sent = Sent(monkeypatch)
        config = engine_config(max_model_len=10_000)
        async with client_of(EngineLauncher(config, worker_factory=NULL_WORKER)) as client:
            await client.start()
            sequences = Sequences(client, request_of(6, max_tokens=8000, grammar=GRAMMAR))
            victim = client.engine_pids[0]
            assert victim is not None
            while len(sequences.token_ids["r_5"]) < 5:
                await asyncio.sleep(0.001)
            client.abort(["r_2"])
            sent.take()
            os.kill(victim, signal.SIGKILL)
            await sequences.until(5)
            assert {len(tokens) for name, tokens in sequences.token_ids.items() if name != "r_2"} == {8000}
            assert client.engine_pids[0] != victim
            requests = [message for message in sent.take()[0] if isinstance(message, EngineRequest)]
            assert [start.request_id for start in requests[0].sequences] == ["r_0", "r_1", "r_3", "r_4", "r_5"]
            assert all(start.output_token_ids for start in requests[0].sequences)
            assert (len(requests), requests[0].grammar) == (1, GRAMMAR)

    asyncio.run(scenario())


def test_tokens_of_n_sequences_are_those_of_each_alone() -> None:
    harness = Harness(num_pages=48, max_num_seqs=4, depth=2)
    wire = make_request("a", 20, max_tokens=12)
    starts = [SequenceStart(str(index), seed=index) for index in (1, 2, 3, 4, 5, 6)]
    assert harness.offer(replace(wire, sequences=starts)) is None
    harness.run()
    for start in starts:
        tokens, reason = alone(replace(wire, sequences=[start]), harness.max_model_len)
        stream = harness.streams[start.request_id]
        assert (stream.token_ids, stream.finish_reason) == (tokens, reason)


def test_a_grammar_that_nobody_uses_was_perhaps_never_sent() -> None:
    """While an engine starts, a request may come and go."""
    lent, request = SentGrammars(), request_of(1, grammar=GRAMMAR)
    lent.add_user(request)
    assert lent.remove_user(request) is None
    lent.add_user(request)
    assert lent.without_known(request) is request
    lent.forget_sent()
    assert lent.without_known(request) is request
    assert lent.remove_user(request) == GRAMMAR.key
