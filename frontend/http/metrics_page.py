"""The text that /metrics answers with."""

from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest


class MetricsPage(Protocol):
    """Where the text comes from."""

    async def text(self) -> bytes:
        """All metrics at this moment, in Prometheus' text format."""


class OwnPage:
    """See `MetricsPage`: the metrics of this process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    async def text(self) -> bytes:
        return generate_latest(self._registry)
