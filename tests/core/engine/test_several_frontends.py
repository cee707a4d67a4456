"""Two frontends on one engine process."""

import asyncio

from quire.core.engine.borrowed_engine import BorrowedEngine
from quire.core.engine.running_engine import EngineAddress, RunningEngine
from quire.core.wire.protocol import FinishReason, SchedulerStats
from quire.core.wire.request_ids import engine_id
from quire.frontend.launch.launcher import EngineLauncher
from quire.frontend.metrics.metrics import Metrics
from tests.core.engine.null_engine import NULL_WORKER, Stream, client_of, engine_config


class _HostLauncher(EngineLauncher):
    """Remembers its engine, for others to visit."""

    engine: RunningEngine

    async def launch(self) -> RunningEngine:
        self.engine = await super().launch()
        return self.engine


class _VisitingLauncher:
    waits_for = None

    def __init__(self, host: _HostLauncher) -> None:
        self._host = host

    async def launch(self) -> RunningEngine:
        engine = self._host.engine
        return BorrowedEngine(EngineAddress(engine.address, engine.keys, engine.pid))

    def retire(self) -> None:
        """Its host's own supervisor says so."""

    def close(self) -> None:
        """The engine's folder is its host's."""


def test_every_frontend_counts_what_the_engine_did_once() -> None:
    """Also when one frontend connects late, and when only one gets a message, such as a refusal."""

    async def scenario() -> None:
        launcher = _HostLauncher(engine_config(), worker_factory=NULL_WORKER)
        metrics = [Metrics("null", 256) for _ in range(2)]
        latest: list[SchedulerStats] = [SchedulerStats(), SchedulerStats()]

        def listener(index: int):
            def on_stats(stats: SchedulerStats) -> None:
                metrics[index].on_stats(0, stats)
                latest[index] = stats

            return on_stats

        async with client_of(launcher, on_stats=listener(0)) as first:
            await first.start()
            assert await Stream(first, "early", [1] * 40, 10).finish_reason() is FinishReason.LENGTH
            async with client_of(_VisitingLauncher(launcher), on_stats=listener(1)) as second:
                await second.start()
                streams = [Stream(first, "a", [1] * 40, 30), Stream(second, "b", [1] * 40, 20)]
                streams.append(Stream(second, "refused", [1] * 300, 5))
                reasons = [await stream.finish_reason() for stream in streams]
                assert reasons == [FinishReason.LENGTH, FinishReason.LENGTH, FinishReason.ERROR]
                assert [len(stream.token_ids) for stream in streams] == [30, 20, 0]
                async with asyncio.timeout(60):
                    while latest[0] != latest[1] or latest[0].num_running:
                        await asyncio.sleep(0.01)
                told = latest[0]
        assert (told.num_prompt_tokens, told.num_generated_tokens) == (40 + 8 + 8, 10 + 30 + 20)
        for each in metrics:
            assert (each.engines[0].prefix_cache_queries, each.engines[0].prefix_cache_hits) == (3 * 40, 2 * 32)
            values = {sample.name: sample.value for family in each.collect() for sample in family.samples}
            assert values["vllm:iteration_tokens_total_count"] == told.num_steps
            assert values["vllm:iteration_tokens_total_sum"] == (40 + 8 + 8) + (10 + 30 + 20)

    asyncio.run(scenario())


def test_replies_are_aborted_whoever_asked_for_them() -> None:
    """All sequences of a reply, and those of no other; each frontend is told of its own."""

    async def scenario() -> None:
        launcher = _HostLauncher(engine_config(max_model_len=10**6), worker_factory=NULL_WORKER)
        async with client_of(launcher) as first:
            await first.start()
            async with client_of(_VisitingLauncher(launcher)) as second:
                await second.start()
                ids = [engine_id("wanted"), engine_id("wanted", 1) + "_0", engine_id("wanted-0"), engine_id("other")]
                streams = [Stream(first, each, [1] * 8, 10**5) for each in ids]
                async with asyncio.timeout(60):
                    while not all(each.token_ids for each in streams):
                        await asyncio.sleep(0.01)
                second.abort_replies(["wanted", "other"], "another tenant")
                second.abort_replies(["wanted", "unknown"])
                assert [await each.finish_reason() for each in streams[:2]] == [FinishReason.ABORT] * 2
                assert first.num_unfinished == 2
                second.abort_replies(["wanted-0", "other"])
                assert [await each.finish_reason() for each in streams[2:]] == [FinishReason.ABORT] * 2
                assert await Stream(first, "next", [1] * 8, 3).finish_reason() is FinishReason.LENGTH

    asyncio.run(scenario())
