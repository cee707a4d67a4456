"""The text that /metrics answers with."""

from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest


class MetricsPage(Protocol):
    """A source of the text."""

    async def text(self) -> bytes:
        """All metrics at this moment, in Prometheus' text format."""


class OwnPage:
    """The metrics of this process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    async def text(self) -> bytes:
        return generate_latest(self._registry)
