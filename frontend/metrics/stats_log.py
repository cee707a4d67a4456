"""A log line for each engine every few seconds while it works, or one for all: throughput, queue, cache."""

import asyncio
import time
from collections.abc import Sequence

from quire.core import envs
from quire.core.logging import get_logger
from quire.frontend.metrics.engine_statistics import EngineStatistics

logger = get_logger(__name__)


class StatsLine:
    """The changes of the counters of some engines, as a line.

    Args:
        name: begins the line.
    """

    def __init__(self, engines: Sequence[EngineStatistics], name: str = "") -> None:
        self._engines = engines
        self._name = name
        self._before = self._counters()
        self._was_idle = True

    def next(self, seconds: float) -> str | None:
        """The changes since the last call, `seconds` ago; None if the engines were idle before that call and since."""
        now = self._counters()
        prompt, output, queries, hits, checked, right = (a - b for a, b in zip(now, self._before, strict=True))
        self._before = now
        running = sum(each.stats.num_running for each in self._engines)
        waiting = sum(each.stats.num_waiting for each in self._engines)
        usage = sum(each.stats.kv_cache_usage for each in self._engines) / len(self._engines)
        idle = not (prompt or output or running or waiting)
        was_idle, self._was_idle = self._was_idle, idle
        if idle and was_idle:
            return None
        hit_rate = f"{100 * hits / queries:.1f}%" if queries else "-"
        return (
            f"{self._name}prompt {prompt / seconds:.1f} tokens/s, output {output / seconds:.1f} tokens/s, "
            f"running {running}, waiting {waiting}, "
            f"KV cache {100 * usage:.1f}%, prefix cache hits {hit_rate}"
            + (f", drafts accepted {right} of {checked} ({100 * right / checked:.1f}%)" if checked else "")
        )

    def _counters(self) -> tuple[int, ...]:
        return (
            sum(each.computed_prompt_tokens for each in self._engines),
            sum(each.generated_tokens for each in self._engines),
            sum(each.prefix_cache_queries for each in self._engines),
            sum(each.prefix_cache_hits for each in self._engines),
            sum(each.num_draft_tokens for each in self._engines),
            sum(each.num_accepted_tokens for each in self._engines),
        )


class StatsLog:
    """Logs the changes of the counters at intervals; an idle engine logs one line, and then nothing.

    Args:
        engines: in the order of their numbers.
        aggregate: one line for all engines together.
    """

    def __init__(self, engines: Sequence[EngineStatistics], *, aggregate: bool = False) -> None:
        if aggregate or len(engines) == 1:
            self._lines = [StatsLine(engines)]
        else:
            self._lines = [StatsLine([each], f"engine {each.label}: ") for each in engines]
        self._interval_seconds = envs.read_float("LOG_STATS_INTERVAL")
        self._told_at = time.monotonic()

    async def run(self) -> None:
        """Logs until cancelled."""
        while True:
            await asyncio.sleep(self._interval_seconds)
            self.log()

    def log(self) -> None:
        """Logs at once. An idle engine is logged only until its last line has said so."""
        now = time.monotonic()
        seconds, self._told_at = now - self._told_at, now
        for line in self.next_lines(seconds):
            logger.info("%s", line)

    def next_lines(self, seconds: float) -> list[str]:
        """The lines about the time since the last call, `seconds` ago."""
        return [text for line in self._lines if (text := line.next(seconds)) is not None]
