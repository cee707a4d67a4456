"""Metrics in a form for messages between processes, and their sum over several."""

from collections.abc import Iterable, Iterator

from msgspec import Struct
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample


class Family(Struct, array_like=True):
    """A Prometheus family."""

    name: str
    kind: str
    text: str
    samples: list[tuple[str, dict[str, str], float]]

    @classmethod
    def of(cls, metric: Metric) -> "Family":
        """The family as the client library has it, without times and examples."""
        samples = [(each.name, dict(each.labels), float(each.value)) for each in metric.samples]
        return cls(metric.name, metric.type, metric.documentation, samples)

    def metric(self) -> Metric:
        """The family for the client library."""
        metric = Metric(self.name, self.text, self.kind)
        metric.samples = [Sample(*each) for each in self.samples]
        return metric


class Collected(Collector):
    """Families that were put together already, for the library's text form."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """Yields the families."""
        yield from self._metrics
