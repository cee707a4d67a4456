"""Prometheus families: made with the labels of one engine, and put together from several sources."""

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.samples import Sample

from quire.frontend.metrics.histogram import Histogram


class Labelled:
    """Makes families of one sample each, or one for each value of a further label.

    Args:
        model_name: the `model_name` label; the first served name.
        engine: the `engine` label: the engine's data-parallel rank.

    Names of metrics are written whole, so that they can be searched for: `vllm:` has vLLM's, `quire:` the others. A
    counter's name ends with `_total`.
    """

    def __init__(self, model_name: str, engine: int) -> None:
        self.labels = {"model_name": model_name, "engine": str(engine)}

    def gauge(self, name: str, text: str, value: float | dict[str, int], label: str | None = None) -> Metric:
        """A gauge."""
        return self._fill(GaugeMetricFamily, name, text, value, label)

    def counter(self, name: str, text: str, value: int | dict[str, int], label: str | None = None) -> Metric:
        """A counter."""
        return self._fill(CounterMetricFamily, name, text, value, label)

    def histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        """A histogram."""
        family = HistogramMetricFamily(name, text, labels=list(self.labels))
        family.add_metric(list(self.labels.values()), histogram.buckets(), histogram.sum)
        return family

    def info(self, name: str, text: str, labels: dict[str, str], value: float) -> Metric:
        """A gauge whose labels are facts."""
        family = GaugeMetricFamily(name, text, labels=[*self.labels, *labels])
        family.add_metric([*self.labels.values(), *labels.values()], value)
        return family

    def _fill(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        value: float | dict[str, int],
        label: str | None,
    ) -> Metric:
        names, values = list(self.labels), list(self.labels.values())
        family = kind(name, text, labels=[*names, label] if label else names)
        if isinstance(value, dict):
            for key, number in value.items():
                family.add_metric([*values, key], number)
        else:
            family.add_metric(values, value)
        return family


def merged(families: Iterable[Metric]) -> Iterator[Metric]:
    """One family of each name, with the samples of all. Equal samples of counters and histograms are added up; of equal
    gauges, the first holds."""
    found: dict[str, Metric] = {}
    samples: dict[str, dict[tuple[str, frozenset[tuple[str, str]]], Sample]] = {}
    for family in families:
        found.setdefault(family.name, family)
        known = samples.setdefault(family.name, {})
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            if key not in known:
                known[key] = sample
            elif family.type != "gauge":
                known[key] = sample._replace(value=known[key].value + sample.value)
    for name, family in found.items():
        family.samples = list(samples[name].values())
        yield family
