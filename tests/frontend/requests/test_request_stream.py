"""Outputs of one request, from the engine's deltas to what a reader gets."""

import asyncio
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from quire.core.errors import EngineError, OverloadedError, ParameterError, TokenizerError
from quire.core.wire.protocol import FinishReason, RequestDelta
from quire.core.wire.row_outputs import RequestFailure, TokenLogprobs
from quire.core.wire.sampling_params import RequestOutputKind, SamplingParams
from quire.frontend.metrics.families import Labelled
from quire.frontend.metrics.request_metrics import RequestMetrics
from quire.frontend.outputs import RequestOutput
from quire.frontend.requests.completion import Completion
from quire.frontend.requests.prompt import Prompt
from quire.frontend.requests.request_stream import RequestStream
from quire.frontend.text.fast_backend import FastBackend
from quire.frontend.text.pieces import PieceKind
from quire.frontend.text.tokenizer import Tokenizer
from tests.frontend.text import tokenizers_zoo

TOKENIZER = Tokenizer(
    FastBackend(tokenizers_zoo.byte_level()), special_tokens={}, chat_templates={}, folder=Path("nowhere")
)
EOS = 1
CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


class Engine:
    """The engine's end of one stream: hands deltas over, and remembers what it was told to abort."""

    def __init__(
        self,
        metrics: RequestMetrics | None = None,
        interval: int = 1,
        tokenizer: Tokenizer = TOKENIZER,
        **sampling: Any,
    ) -> None:
        params = SamplingParams(**sampling)
        completions = [
            Completion(index, f"r_{index}", [5, 6], params, tokenizer, interval) for index in range(params.n)
        ]
        self.aborted: list[str] = []
        self.closed = 0
        self.stream = RequestStream(
            "r",
            Prompt("hi", [5, 6]),
            params,
            completions,
            metrics=metrics,
            abort=self.aborted.extend,
            on_close=self._on_close,
        )
        self._on_delta = self.stream.on_deltas

    def _on_close(self, stream: RequestStream) -> None:
        self.closed += 1

    def give(self, token_ids: list[int], end: FinishReason | None = None, index: int = 0, **fields: Any) -> None:
        self._on_delta[index](RequestDelta(f"r_{index}", token_ids, finish_reason=end, **fields))

    async def next(self) -> RequestOutput:
        return await asyncio.wait_for(anext(self.stream), 60)

    async def rest(self) -> list[RequestOutput]:
        return [output async for output in self.stream]


def on_loop(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def test_a_stream_in_portions_of_several_tokens() -> None:
    async def portions(interval: int) -> list[int]:
        engine = Engine(interval=interval, output_kind=DELTA)
        sizes = []
        for token_id in range(10, 19):
            engine.give([token_id], FinishReason.LENGTH if token_id == 18 else None)
            if engine.stream._has_news:
                sizes.append(len((await engine.next()).outputs[0].token_ids))
        assert await engine.rest() == []
        return sizes

    assert asyncio.run(portions(1)) == [1] * 9
    assert asyncio.run(portions(3)) == [1, 3, 3, 2]
    assert asyncio.run(portions(100)) == [1, 8]


def test_each_kind_of_output() -> None:
    async def outputs(kind: RequestOutputKind) -> list[tuple[str, int, bool]]:
        engine, seen = Engine(output_kind=kind), []
        for text, end in (("the ", None), ("quick ", None), ("fox", FinishReason.LENGTH)):
            engine.give(encode(text), end)
            if kind is not FINAL_ONLY or end:
                seen.append(await engine.next())
        assert await engine.rest() == []
        assert engine.closed == 1
        return [(output.outputs[0].text, len(output.outputs[0].token_ids), output.finished) for output in seen]

    a, b, c = (len(encode(text)) for text in ("the ", "quick ", "fox"))
    assert asyncio.run(outputs(CUMULATIVE)) == [
        ("the ", a, False), ("the quick ", a + b, False), ("the quick fox", a + b + c, True),
    ]  # fmt: skip
    assert asyncio.run(outputs(DELTA)) == [("the ", a, False), ("quick ", b, False), ("fox", c, True)]
    assert asyncio.run(outputs(FINAL_ONLY)) == [("the quick fox", a + b + c, True)]


def test_a_slow_reader_finds_steps_merged() -> None:
    async def work() -> None:
        engine = Engine(output_kind=DELTA, max_tokens=1000)
        for _ in range(100):
            engine.give(encode("ab"))
        output = await engine.next()
        assert output.outputs[0].text == "ab" * 100
        engine.give(encode("c"), FinishReason.LENGTH)
        [last] = await engine.rest()
        assert (last.outputs[0].text, last.finished, last.outputs[0].finish_reason) == ("c", True, "length")

    on_loop(work())


def test_the_token_that_ends_is_counted_but_is_no_text() -> None:
    async def work(token_id: int, **fields: Any) -> tuple[str, list[int], Any]:
        engine = Engine(output_kind=FINAL_ONLY, **fields)
        engine.give(encode("hi"))
        engine.give([token_id], FinishReason.STOP, stop_token_id=None if token_id == EOS else token_id)
        [output] = await engine.rest()
        [completion] = output.outputs
        assert completion.finish_reason == "stop"
        return completion.text, completion.token_ids, completion.stop_reason

    [x] = encode("x")
    assert asyncio.run(work(EOS)) == ("hi", [*encode("hi"), EOS], None)
    assert asyncio.run(work(EOS, skip_special_tokens=False)) == ("hi", [*encode("hi"), EOS], None)
    assert asyncio.run(work(x)) == ("hi", [*encode("hi"), x], x)
    assert asyncio.run(work(x, include_stop_str_in_output=True)) == ("hix", [*encode("hi"), x], x)


@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_watch_ends_a_sequence_at_its_token_however_tokens_come(size: int) -> None:
    async def work() -> None:
        engine = Engine(output_kind=DELTA, logprobs=0)
        seen: list[str] = []

        def watch(text: str, token_ids: Sequence[int]) -> bool:
            assert len(token_ids) == 1
            seen.append(text)
            return "".join(seen).endswith("end")

        engine.stream.watch(0, watch)
        token_ids = encode("the end of it")
        for start in range(0, len(token_ids), size):
            piece = token_ids[start : start + size]
            logprobs = [TokenLogprobs([each], [-1.0], [1]) for each in piece]
            engine.give(piece, FinishReason.LENGTH if start + size >= len(token_ids) else None, logprobs=logprobs)
        [output] = await engine.rest()  # a slow reader
        [completion] = output.outputs
        assert (completion.text, completion.finish_reason, completion.stop_reason) == ("the end", "stop", None)
        assert "".join(map(TOKENIZER.token_text, completion.token_ids)) == "the end"
        assert completion.logprobs is not None
        assert len(completion.logprobs) == len(completion.token_ids)
        assert engine.aborted == (["r_0"] if size < len(token_ids) else [])  # not what has ended by itself

    on_loop(work())


def test_a_stop_string_ends_the_request_in_the_engine_too() -> None:
    async def work() -> None:
        metrics = RequestMetrics(Labelled("m", 0), 100)
        engine = Engine(metrics, output_kind=DELTA, stop=["STOP"], logprobs=0)
        tokens = encode("one ST")
        engine.give(tokens, logprobs=[TokenLogprobs([t], [-1.0], 1) for t in tokens])
        first = await engine.next()
        assert first.outputs[0].text == "one "
        tokens = [*encode("OP"), *encode("more")]
        engine.give(tokens, logprobs=[TokenLogprobs([t], [-1.0], 1) for t in tokens])
        assert engine.aborted == ["r_0"]
        engine.give(encode("late"))
        [last] = await engine.rest()
        [completion] = last.outputs
        assert (completion.text, completion.finish_reason, completion.stop_reason) == ("", "stop", "STOP")
        assert completion.token_ids == encode("OP")
        assert len(completion.logprobs or []) == len(encode("OP"))
        assert completion.cumulative_logprob == -float(len(encode("one ST")) + len(encode("OP")))
        assert metrics.generation_tokens == len(encode("one ST")) + len(encode("OP"))

    on_loop(work())


@pytest.mark.parametrize(
    ("text", "end", "sampling"),
    [
        ("one two STOP three", FinishReason.LENGTH, {"stop": ["STOP"]}),
        ("STOP one STOP two", FinishReason.LENGTH, {"stop": ["STOP"], "min_tokens": 6}),
        ("one STOP two", FinishReason.LENGTH, {"stop": ["TOP t", "STOP"], "include_stop_str_in_output": True}),
        ("it ends with ST", FinishReason.STOP, {"stop": ["STOP"]}),
        ("größer als 你好", FinishReason.LENGTH, {"logprobs": 0}),
        ("one STOP two", FinishReason.STOP, {"stop": ["STOP"], "logprobs": 0}),
    ],
)
@pytest.mark.parametrize("kind", [DELTA, FINAL_ONLY])
def test_how_tokens_are_grouped_into_deltas_changes_nothing(
    text: str, end: FinishReason, sampling: dict[str, Any], kind: RequestOutputKind
) -> None:
    tokens = encode(text) + ([EOS] if end is FinishReason.STOP else [])

    async def outcome(num_tokens: int) -> tuple[object, ...]:
        """The outcome with `num_tokens` tokens a delta."""
        engine = Engine(output_kind=kind, **sampling)
        for start in range(0, len(tokens), num_tokens):
            part = tokens[start : start + num_tokens]
            logprobs = (
                [TokenLogprobs([token], [-float(token)], 1) for token in part] if "logprobs" in sampling else None
            )
            last = start + num_tokens >= len(tokens)
            engine.give(part, end if last else None, logprobs=logprobs)
        completions = [output.outputs[0] for output in await engine.rest()]
        rows = [row for each in completions for row in each.logprobs or []]
        last_one = completions[-1]
        return (
            "".join(each.text for each in completions),
            [token for each in completions for token in each.token_ids],
            [list(row) for row in rows],
            (last_one.cumulative_logprob, last_one.finish_reason, last_one.stop_reason),
        )

    one_by_one = asyncio.run(outcome(1))
    for num_tokens in (2, 3, 5, len(tokens)):
        assert asyncio.run(outcome(num_tokens)) == one_by_one


def test_several_completions_in_one_stream() -> None:
    async def work() -> None:
        engine = Engine(n=3, output_kind=DELTA)
        engine.give(encode("b"), index=1)
        engine.give(encode("c"), FinishReason.LENGTH, index=2)
        output = await engine.next()
        assert [(each.index, each.text) for each in output.outputs] == [(1, "b"), (2, "c")]
        assert not output.finished
        engine.give(encode("a"), FinishReason.LENGTH, index=0)
        engine.give(encode("B"), FinishReason.LENGTH, index=1)
        [last] = await engine.rest()
        assert [(each.index, each.text) for each in last.outputs] == [(0, "a"), (1, "B")]
        assert last.finished

    on_loop(work())


def test_logprobs_name_tokens_and_ranks() -> None:
    async def work() -> None:
        a, b, c = encode("abc")[0:1] + encode("x") + encode("y")
        engine = Engine(output_kind=FINAL_ONLY, logprobs=2)
        engine.give(
            [c, a],
            logprobs=[TokenLogprobs([c, a, b], [-3.0, -0.5, -1.0], 7), TokenLogprobs([a, a, b], [-0.5, -0.5, -1.0], 1)],
        )
        engine.give([], FinishReason.LENGTH)
        [output] = await engine.rest()
        [completion] = output.outputs
        first, second = completion.logprobs or []
        assert [(key, value.logprob, value.rank) for key, value in first.items()] == [
            (c, -3.0, 7),
            (a, -0.5, 1),
            (b, -1.0, 2),
        ]
        assert [(key, value.rank) for key, value in second.items()] == [(a, 1), (b, 2)]
        assert first[b].decoded_token == "x"
        assert completion.cumulative_logprob == -3.5

    on_loop(work())


@pytest.mark.parametrize(
    ("kind", "error"), [("invalid", ParameterError), ("overloaded", OverloadedError), ("internal", EngineError)]
)
def test_failures_are_raised_at_the_reader(kind: str, error: type[Exception]) -> None:
    async def work() -> None:
        metrics = RequestMetrics(Labelled("m", 0), 100)
        engine = Engine(metrics, n=2)
        engine.give(
            [], FinishReason.ERROR, failure=RequestFailure(kind, "what went wrong", 2.5, limit="max_num_queued_reqs")
        )
        with pytest.raises(error, match="what went wrong") as caught:
            await engine.next()
        if isinstance(caught.value, OverloadedError):
            assert caught.value.retry_after_seconds == 2.5
        assert sum(metrics.rejections.values()) == (kind == "overloaded")
        assert "r_1" in engine.aborted, "the other completion is of no use any more"
        assert engine.closed == 1
        assert await engine.rest() == []

    on_loop(work())


@pytest.mark.parametrize("is_slow", [False, True])
def test_tokens_before_a_failure_reach_a_reader_of_any_speed(is_slow: bool) -> None:
    async def work() -> None:
        engine, text = Engine(output_kind=DELTA), ""
        for _ in range(3):
            engine.give(encode("ab"))
            if not is_slow:
                text += (await engine.next()).outputs[0].text
        engine.give([], FinishReason.ERROR, failure=RequestFailure("invalid", "what went wrong"))
        if is_slow:
            output = await engine.next()
            text += output.outputs[0].text
            assert (output.finished, output.outputs[0].finish_reason) == (False, None)
        assert text == "ababab"
        with pytest.raises(ParameterError, match="what went wrong"):
            await engine.next()
        assert await engine.rest() == []

    on_loop(work())


@pytest.mark.parametrize("kind", [DELTA, FINAL_ONLY])
def test_a_dead_end_ends_the_output_as_a_limit_does(kind: RequestOutputKind, caplog: pytest.LogCaptureFixture) -> None:
    """The text so far is delivered, and the log names the cause."""

    async def work() -> None:
        engine = Engine(output_kind=kind)
        engine.give(encode("ab"))
        engine.give([], FinishReason.LENGTH, failure=RequestFailure("dead_end", "no way on"))
        outputs = await engine.rest()
        last = outputs[-1].outputs[0]
        assert "".join(each.outputs[0].text for each in outputs) == "ab"
        assert (last.finish_reason, last.stop_reason) == ("length", "grammar_dead_end")

    on_loop(work())
    assert caplog.messages == ["the output of request r ends early: no way on"]


def test_abort_gives_a_last_output_and_close_none() -> None:
    async def work() -> None:
        engine = Engine(output_kind=DELTA)
        engine.give(encode("so far"))
        engine.stream.abort()
        [output] = await engine.rest()
        assert (output.outputs[0].text, output.outputs[0].finish_reason, output.finished) == ("so far", "abort", True)
        assert (engine.aborted, engine.closed) == (["r_0"], 1)
        engine = Engine()
        engine.stream.close()
        engine.stream.close()
        assert await engine.rest() == []
        assert (engine.aborted, engine.closed) == (["r_0"], 1)

    on_loop(work())


def test_times_and_counts() -> None:
    async def work() -> None:
        engine = Engine(output_kind=FINAL_ONLY)
        engine.give(encode("x"), num_cached_tokens=1, queued_at=10.0, scheduled_at=10.5)
        engine.give(encode("y"), FinishReason.LENGTH, num_preemptions=2)
        [output] = await engine.rest()
        times = output.metrics
        assert times is not None
        assert (output.num_cached_tokens, times.num_preemptions, times.num_generation_tokens) == (1, 2, 2)
        assert times.time_in_queue == 0.5
        assert times.first_token_time <= times.last_token_time <= times.finished_time
        assert output.prompt == "hi"
        assert output.prompt_token_ids == [5, 6]

    on_loop(work())


class Undecodable(FastBackend):
    """Knows no text of token 7, as a checkpoint's own code in Python may fail."""

    def find_kind(self) -> tuple[PieceKind, int]:
        return "other", 0

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        if 7 in token_ids:
            raise TokenizerError("no text")
        return super().decode(token_ids, skip_special_tokens)


def test_tokens_without_a_text_fail_their_request_alone() -> None:
    """The delta's handler must not raise: the engine would be taken for broken, and all requests with it."""
    backend = Undecodable(tokenizers_zoo.byte_level())
    tokenizer = Tokenizer(backend, special_tokens={}, chat_templates={}, folder=Path("nowhere"))

    async def scenario() -> None:
        engine = Engine(tokenizer=tokenizer, output_kind=DELTA)
        engine.give([5])
        engine.give([7])
        assert engine.aborted == ["r_0"]
        assert [each.token_ids for each in (await anext(engine.stream)).outputs] == [[5]]
        with pytest.raises(TokenizerError, match="no text"):
            await anext(engine.stream)

    asyncio.run(scenario())
