"""How often answers were searched for calls, and whether any were found, under vLLM's name."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Literal, TypeAlias

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

RequestType: TypeAlias = Literal["chat_completions", "responses", "other"]
_LABELS = {
    "mode": ("streaming", "non_streaming"),
    "outcome": ("tool_call", "no_tool_call"),
    "request_type": ("chat_completions", "responses", "other"),
}


class ToolCallSearches(Collector):
    """Counts searches for calls: one for each answer, and in streams one for each piece of it.

    Args:
        model_name: the `model_name` label; the first served name.
    """

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._counts = dict.fromkeys(product(*_LABELS.values()), 0)

    def counter(self, request_type: RequestType, *, streaming: bool) -> Callable[[bool], None]:
        """Counts a search by whether it found a call, or a part of one."""
        mode = _LABELS["mode"][not streaming]

        def count(found: bool) -> None:
            self._counts[mode, _LABELS["outcome"][not found], request_type] += 1

        return count

    def collect(self) -> Iterator[Metric]:
        """Yields the family for one scrape."""
        text = "Searches for calls: one for each answer, in streams one for each piece."
        family = CounterMetricFamily("vllm:tool_call_parser_invocations_total", text, labels=["model_name", *_LABELS])
        for values, count in self._counts.items():
            family.add_metric([self._model_name, *values], count)
        yield family
