"""One log line every few seconds while the engine works: throughput, queue, cache."""

import asyncio
import time

from quire.core import envs
from quire.core.logging import get_logger
from quire.frontend.metrics.metrics import EngineMetrics

logger = get_logger(__name__)


class StatsLog:
    """Logs the changes of the counters at intervals; an idle engine logs one line, and then nothing."""

    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics = metrics
        self._interval_seconds = envs.read_float("LOG_STATS_INTERVAL")
        self._before = self._counters()
        self._was_idle = True
        self._told_at = time.monotonic()

    async def run(self) -> None:
        """Logs until cancelled."""
        while True:
            await asyncio.sleep(self._interval_seconds)
            self.log()

    def log(self) -> None:
        """Logs a line at once, unless the engine is idle and that was told."""
        now = time.monotonic()
        seconds, self._told_at = now - self._told_at, now
        if line := self.next_line(seconds):
            logger.info("%s", line)

    def next_line(self, seconds: float) -> str | None:
        """The changes since the last call, `seconds` ago; None if the engine was idle before that call and since."""
        now = self._counters()
        prompt, output, queries, hits = (a - b for a, b in zip(now, self._before, strict=True))
        self._before = now
        stats = self._metrics.stats
        idle = not (prompt or output or stats.num_running or stats.num_waiting)
        was_idle, self._was_idle = self._was_idle, idle
        if idle and was_idle:
            return None
        hit_rate = f"{100 * hits / queries:.1f}%" if queries else "-"
        return (
            f"prompt {prompt / seconds:.1f} tokens/s, output {output / seconds:.1f} tokens/s, "
            f"running {stats.num_running}, waiting {stats.num_waiting}, "
            f"KV cache {100 * stats.kv_cache_usage:.1f}%, prefix cache hits {hit_rate}"
        )

    def _counters(self) -> tuple[int, int, int, int]:
        metrics = self._metrics
        return (
            metrics.computed_prompt_tokens,
            metrics.generation_tokens,
            metrics.prefix_cache_queries,
            metrics.prefix_cache_hits,
        )
