"""The metrics of engine and requests, under vLLM's names, so that dashboards for vLLM work.

`EngineMetrics` has plain numbers, which the event loop increments without locks. They become Prometheus families only
when `/metrics` is read. HTTP requests are counted in `middleware.py`.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from msgspec import Struct
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from quire.core.wire.protocol import FinishReason, SchedulerStats

TTFT_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
COMPLETIONS = (1, 2, 5, 10, 20)
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)


class FinishedRequest(Struct):
    """One sequence that ended, for any reason. Times are CLOCK_MONOTONIC seconds; 0 if the event did not happen."""

    finish_reason: FinishReason
    num_prompt_tokens: int
    num_generation_tokens: int
    num_cached_tokens: int
    arrived_at: float
    queued_at: float
    scheduled_at: float
    first_token_at: float
    last_token_at: float
    finished_at: float
    num_preemptions: int = 0


class Histogram:
    """Counts per bucket; `observe` takes a binary search and two additions."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts as (upper bound, count), as Prometheus takes them."""
        total = 0
        out: list[tuple[str, float]] = []
        for bound, count in zip((*self._bounds, math.inf), self._counts, strict=True):
            total += count
            out.append(("+Inf" if bound == math.inf else str(float(bound)), total))
        return out

    @property
    def sum(self) -> float:
        return self._sum


def length_bounds(longest: int) -> list[int]:
    """1, 2, 5, 10, 20, 50 ... up to `longest` tokens."""
    bounds, unit = [], 1
    while unit <= longest:
        bounds += [unit * step for step in (1, 2, 5) if unit * step <= longest]
        unit *= 10
    return bounds or [1]


class EngineMetrics(Collector):
    """The metrics of one engine and its requests.

    Args:
        model_name: the `model_name` label; the first served name.
        max_model_len: the largest bucket of length histograms, in tokens.
        cache_info: labels of `vllm:cache_config_info`: facts about the KV cache.
    """

    def __init__(self, model_name: str, max_model_len: int, cache_info: dict[str, str] | None = None) -> None:
        self._labels = {"model_name": model_name, "engine": "0"}
        self.cache_info = cache_info or {}
        self.stats = SchedulerStats()  # the latest gauges
        self.prompt_tokens = 0
        self.computed_prompt_tokens = 0  # by the engine, for all its frontends, as chunks are done
        self.cached_tokens = 0
        self.generation_tokens = 0
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self.num_preemptions = 0
        self.rejections = 0
        self._finished = dict.fromkeys(FinishReason, 0)
        lengths = length_bounds(max_model_len)
        self._step_tokens = Histogram(STEP_TOKENS)
        self._ttft = Histogram(TTFT_SECONDS)
        self._inter_token = Histogram(TOKEN_SECONDS)
        self._per_output_token = Histogram(TOKEN_SECONDS)
        self._e2e = Histogram(REQUEST_SECONDS)
        self._queue = Histogram(REQUEST_SECONDS)
        self._inference = Histogram(REQUEST_SECONDS)
        self._prefill = Histogram(REQUEST_SECONDS)
        self._decode = Histogram(REQUEST_SECONDS)
        self._prompt_length = Histogram(lengths)
        self._generation_length = Histogram(lengths)
        self._computed_length = Histogram(lengths)
        self._longest_generation = Histogram(lengths)
        self._params_n = Histogram(COMPLETIONS)
        self._params_max_tokens = Histogram(lengths)
        self._request_preemptions = Histogram(PREEMPTIONS)

    # ------------------------------------------------------------------------------------------ the request path

    def on_stats(self, stats: SchedulerStats) -> None:
        """Takes statistics of a step, a refusal or a heartbeat. An engine that was started again counts from zero."""
        before = self.stats if stats.started_at == self.stats.started_at else SchedulerStats()
        self.stats = stats
        self.prefix_cache_queries += stats.prefix_cache_queries - before.prefix_cache_queries
        self.prefix_cache_hits += stats.prefix_cache_hits - before.prefix_cache_hits
        self.num_preemptions += stats.num_preemptions - before.num_preemptions
        self.computed_prompt_tokens += stats.num_prompt_tokens - before.num_prompt_tokens
        num_steps = stats.num_steps - before.num_steps  # more than one when this frontend has just come
        if num_steps:
            num_prefilled = stats.num_prefilled_tokens - before.num_prefilled_tokens
            num_generated = stats.num_generated_tokens - before.num_generated_tokens
            self._step_tokens.observe((num_prefilled + num_generated) / num_steps, num_steps)

    def on_first_tokens(self, num_tokens: int, seconds: float, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """Counts a sequence's first `num_tokens` output tokens, `seconds` after the request arrived."""
        self.generation_tokens += num_tokens
        self.prompt_tokens += num_prompt_tokens
        self.cached_tokens += num_cached_tokens
        self._ttft.observe(seconds)

    def on_tokens(self, num_tokens: int, seconds: float) -> None:
        """Counts further output tokens of a sequence, `seconds` after the previous ones."""
        self.generation_tokens += num_tokens
        self._inter_token.observe(seconds)

    def on_request_finished(self, request: FinishedRequest) -> None:
        """Counts a sequence that ended; with n > 1, called for each of the n sequences."""
        self._finished[request.finish_reason] += 1
        self._e2e.observe(request.finished_at - request.arrived_at)
        self._prompt_length.observe(request.num_prompt_tokens)
        self._generation_length.observe(request.num_generation_tokens)
        self._request_preemptions.observe(request.num_preemptions)
        if request.scheduled_at:
            self._queue.observe(request.scheduled_at - request.queued_at)
            ended_at = request.last_token_at or request.finished_at
            self._inference.observe(max(ended_at - request.scheduled_at, 0.0))
            self._computed_length.observe(request.num_prompt_tokens - request.num_cached_tokens)
        if request.first_token_at:
            decode = request.last_token_at - request.first_token_at
            self._prefill.observe(request.first_token_at - (request.scheduled_at or request.arrived_at))
            self._decode.observe(decode)
            if request.num_generation_tokens > 1:
                self._per_output_token.observe(decode / (request.num_generation_tokens - 1))

    def on_params(self, n: int, max_tokens: int | None, num_generation_tokens: int) -> None:
        """Counts a request whose sequences have all ended: its parameters, and its longest output in tokens."""
        self._params_n.observe(n)
        self._longest_generation.observe(num_generation_tokens)
        if max_tokens is not None:
            self._params_max_tokens.observe(max_tokens)

    def on_rejected(self) -> None:
        """Counts a request that was refused because the queue is full."""
        self.rejections += 1

    # --------------------------------------------------------------------------------------------------- scraping

    def collect(self) -> Iterator[Metric]:
        """Yields the families for one scrape."""
        yield from self._gauges()
        yield from self._counters()
        for name, text, histogram in self._histograms():
            yield self._histogram(name, text, histogram)

    def _gauges(self) -> Iterator[Metric]:
        stats = self.stats
        yield self._gauge("num_requests_running", "Requests in the running batch.", stats.num_running)
        yield self._gauge("num_requests_waiting", "Requests in the queue.", stats.num_waiting)
        yield self._gauge(
            "num_requests_waiting_by_reason",
            "Requests in the queue, by what they wait for.",
            {"capacity": stats.num_waiting, "deferred": 0},
            "reason",
        )
        yield self._gauge("kv_cache_usage_perc", "Share of KV-cache pages in use; 1 is full.", stats.kv_cache_usage)
        yield self._gauge(
            "engine_sleep_state",
            "1 for the state the engine is in.",
            {"awake": 1, "weights_offloaded": 0, "discard_all": 0},
            "sleep_state",
        )
        yield self._info("cache_config_info", "Facts about the KV cache, as labels.", self.cache_info, 1)

    def _counters(self) -> Iterator[Metric]:
        looked_up, found = "Prompt tokens looked up in the prefix cache.", "Prompt tokens found in the prefix cache."
        computed = self.prompt_tokens - self.cached_tokens
        sources = {"local_compute": computed, "local_cache_hit": self.cached_tokens, "external_kv_transfer": 0}
        places = {"device": self.prefix_cache_hits, "host": 0, "p2p": 0, "disk": 0, "external_unspecified": 0}
        finished = {str(reason): count for reason, count in self._finished.items()}
        for name, text, value in (
            ("prefix_cache_queries", looked_up, self.prefix_cache_queries),
            ("prefix_cache_hits", found, self.prefix_cache_hits),
            ("external_prefix_cache_queries", "Tokens looked up in caches of other engines.", 0),
            ("external_prefix_cache_hits", "Tokens found in caches of other engines.", 0),
            ("mm_cache_queries", "Multimodal items looked up.", 0),
            ("mm_cache_hits", "Multimodal items found.", 0),
            ("num_preemptions", "Times that a request lost its pages to another.", self.num_preemptions),
            ("prompt_tokens", "Prompt tokens of requests that began to answer.", self.prompt_tokens),
            ("prompt_tokens_cached", "Prompt tokens that came from a cache.", self.cached_tokens),
            ("generation_tokens", "Tokens generated.", self.generation_tokens),
        ):
            yield self._counter(name, text, value)
        for name, text, values, label in (
            ("prompt_tokens_by_source", "Prompt tokens, by where they came from.", sources, "source"),
            ("prompt_tokens_cached_by_source", "Tokens found in a cache, by its place.", places, "source"),
            ("request_success", "Finished sequences, by how they ended.", finished, "finished_reason"),
        ):
            yield self._counter(name, text, values, label)
        rejected = "Requests turned away with 429, by the limit they met."
        rejections = CounterMetricFamily("vllm:admission_rejections", rejected, labels=["model_name", "reason"])
        rejections.add_metric([self._labels["model_name"], "max_num_queued_reqs"], self.rejections)
        yield rejections

    def _histograms(self) -> tuple[tuple[str, str, Histogram], ...]:
        between = "Seconds between output tokens of a sequence."
        return (
            ("iteration_tokens_total", "Tokens a step generated, and those of prompts it ended.", self._step_tokens),
            ("time_to_first_token_seconds", "Seconds from arrival to the first token.", self._ttft),
            ("inter_token_latency_seconds", between, self._inter_token),
            ("request_time_per_output_token_seconds", "A sequence's mean of those.", self._per_output_token),
            ("e2e_request_latency_seconds", "Seconds from arrival to the end.", self._e2e),
            ("request_queue_time_seconds", "Seconds in the queue.", self._queue),
            ("request_inference_time_seconds", "Seconds from first step to last token.", self._inference),
            ("request_prefill_time_seconds", "Seconds from first step to first token.", self._prefill),
            ("request_decode_time_seconds", "Seconds from first to last token.", self._decode),
            ("request_prompt_tokens", "Prompt tokens.", self._prompt_length),
            ("request_generation_tokens", "Output tokens.", self._generation_length),
            ("request_prefill_kv_computed_tokens", "Prompt tokens not found in a cache.", self._computed_length),
            ("request_max_num_generation_tokens", "Longest output of a request.", self._longest_generation),
            ("request_params_n", "n of requests.", self._params_n),
            ("request_params_max_tokens", "max_tokens of requests.", self._params_max_tokens),
            ("request_num_preemptions", "Preemptions of a sequence.", self._request_preemptions),
        )

    def _gauge(self, name: str, text: str, value: float | dict[str, int], label: str | None = None) -> Metric:
        return self._fill(GaugeMetricFamily, name, text, value, label)

    def _counter(self, name: str, text: str, value: int | dict[str, int], label: str | None = None) -> Metric:
        return self._fill(CounterMetricFamily, name, text, value, label)

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(f"vllm:{name}", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), histogram.buckets(), histogram.sum)
        return family

    def _fill(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        value: float | dict[str, int],
        label: str | None,
    ) -> Metric:
        names, values = list(self._labels), list(self._labels.values())
        family = kind(f"vllm:{name}", text, labels=[*names, label] if label else names)
        if isinstance(value, dict):
            for key, number in value.items():
                family.add_metric([*values, key], number)
        else:
            family.add_metric(values, value)
        return family

    def _info(self, name: str, text: str, labels: dict[str, str], value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=[*self._labels, *labels])
        family.add_metric([*self._labels.values(), *labels.values()], value)
        return family
