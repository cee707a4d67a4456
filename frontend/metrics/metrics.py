"""The metrics of engines and requests, under vLLM's names, so that dashboards for vLLM work.

They are plain integers and floats, which the event loop increments without locks. They become Prometheus families only
when `/metrics` is read. HTTP requests are counted in `middleware.py`.
"""

from collections.abc import Iterator, Sequence
from itertools import chain

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from quire.core.wire.protocol import SchedulerStats
from quire.frontend.metrics.engine_statistics import EngineStatistics
from quire.frontend.metrics.families import Labelled, merged
from quire.frontend.metrics.recovery_metrics import RecoveryMetrics
from quire.frontend.metrics.request_metrics import RequestMetrics


class Metrics(Collector):
    """The metrics of a frontend's engines and of its requests.

    Args:
        model_name: the `model_name` label; the first served name.
        max_model_len: the largest bucket of length histograms, in tokens.
        engines: the `engine` labels, by the engine's number.
        counts_engines: whether the engines' own statistics are shown here, and not by another process.
        max_adapters: in one step of an engine; 0: the engines take none.

    Attributes:
        engines: what the engines report, by their number.
        requests: what is counted of requests, by the number of the engine that first had them.
        recoveries: what is counted of requests that survive an engine, by the number of the engine that has them then.
    """

    def __init__(
        self,
        model_name: str,
        max_model_len: int,
        engines: Sequence[int] = (0,),
        *,
        counts_engines: bool = True,
        max_adapters: int = 0,
    ) -> None:
        families = [Labelled(model_name, engine) for engine in engines]
        self.engines = [EngineStatistics(each, max_adapters=max_adapters) for each in families]
        self.requests = [RequestMetrics(each, max_model_len) for each in families]
        self.recoveries = [RecoveryMetrics(each) for each in families]
        self.counts_engines = counts_engines

    def on_stats(self, engine: int, stats: SchedulerStats) -> None:
        """Takes the statistics of the engine with a number."""
        self.engines[engine].on_stats(stats)

    def on_replay(self, engine: int) -> None:
        """Counts a request that the engine with a number takes over."""
        self.recoveries[engine].on_replay()

    def on_pause(self, engine: int, seconds: float) -> None:
        """Counts a sequence that goes on at the engine with a number."""
        self.recoveries[engine].on_pause(seconds)

    @property
    def num_waiting(self) -> int:
        """Sequences in the queues of all engines."""
        return sum(each.stats.num_waiting for each in self.engines)

    @property
    def kv_cache_usage(self) -> float:
        """Share of all engines' pages that are in use, 0 to 1; engines have equally many."""
        return sum(each.stats.kv_cache_usage for each in self.engines) / len(self.engines)

    def collect(self) -> Iterator[Metric]:
        """Yields the families for one scrape."""
        sources: list[EngineStatistics | RequestMetrics | RecoveryMetrics] = [*self.requests, *self.recoveries]
        if self.counts_engines:
            sources += self.engines
        return merged(chain.from_iterable(each.collect() for each in sources))
