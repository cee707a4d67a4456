"""Metrics as plain objects, with vLLM's names: what `/metrics` shows, for programs."""

import math
from collections.abc import Iterable

from msgspec import Struct
from prometheus_client import Metric as Family


class Metric(Struct, kw_only=True):
    """A metric. Several may share a name, with other labels."""

    name: str
    labels: dict[str, str]


class Counter(Metric):
    """A count that only grows."""

    value: int


class Vector(Metric):
    """Counts by position, such as of drafts accepted."""

    values: list[int]


class Gauge(Metric):
    """A number that goes up and down."""

    value: float


class Histogram(Metric):
    """Observations counted in buckets: by the upper bound of each, how many lie at or below it; `+Inf` has all."""

    count: int
    sum: float
    buckets: dict[str, int]


POSITION = "position"
"""The label of counts that a `Vector` has together."""


def read_metrics(families: Iterable[Family]) -> list[Metric]:
    """The metrics of Prometheus families. A counter's name lacks the `_total` that its sample has."""
    found: list[Metric] = []
    for family in families:
        match family.type:
            case "gauge":
                found += [Gauge(name=family.name, labels=each.labels, value=each.value) for each in family.samples]
            case "counter" if any(POSITION in each.labels for each in family.samples):
                found += _vectors(family)
            case "counter":
                found += [
                    Counter(name=family.name, labels=each.labels, value=int(each.value))
                    for each in family.samples
                    if each.name == f"{family.name}_total"
                ]
            case "histogram":
                found += _histograms(family)
    return found


def _histograms(family: Family) -> list[Histogram]:
    found: dict[frozenset[tuple[str, str]], Histogram] = {}
    for sample in family.samples:
        labels = {name: value for name, value in sample.labels.items() if name != "le"}
        key = frozenset(labels.items())
        histogram = found.setdefault(key, Histogram(name=family.name, labels=labels, count=0, sum=math.nan, buckets={}))
        match sample.name.removeprefix(family.name):
            case "_bucket":
                histogram.buckets[sample.labels["le"]] = int(sample.value)
            case "_count":
                histogram.count = int(sample.value)
            case "_sum":
                histogram.sum = sample.value
    return list(found.values())


def _vectors(family: Family) -> list[Vector]:
    found: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for sample in family.samples:
        labels = tuple(item for item in sample.labels.items() if item[0] != POSITION)
        found.setdefault(labels, []).append(int(sample.value))
    return [Vector(name=family.name, labels=dict(labels), values=values) for labels, values in found.items()]
