"""What the holders of keys have used, for /metrics. The labels are names of the key file, and nothing that clients
send."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

_KINDS = {
    "requests": ("quire:key_requests_total", "Requests that a key's limits let in."),
    "prompt_tokens": ("quire:key_prompt_tokens_total", "Tokens of a key's prompts."),
    "generation_tokens": ("quire:key_generation_tokens_total", "Tokens generated for a key."),
    "refused_requests": ("quire:key_refused_requests_total", "Requests past a key's requests a minute."),
    "refused_tokens": ("quire:key_refused_tokens_total", "Requests past a key's tokens a minute."),
}


class KeyUsage(Collector):
    """Counts by key and kind."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[str, int]] = {}  # by key, then by kind

    def show(self, name: str) -> None:
        """Shows a key, with zeros as long as it has used nothing."""
        self._counts.setdefault(name, dict.fromkeys(_KINDS, 0))

    def add(self, name: str, kind: str, amount: int) -> None:
        """Counts something that the key with this name has used."""
        self._counts[name][kind] += amount

    def collect(self) -> Iterator[Metric]:
        """Yields the families for one scrape."""
        for kind, (name, text) in _KINDS.items():
            family = CounterMetricFamily(name, text, labels=["key"])
            for key, counts in self._counts.items():
                family.add_metric([key], counts[kind])
            yield family
