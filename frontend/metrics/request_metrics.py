"""The metrics of one frontend's requests."""

from collections.abc import Iterator

from msgspec import Struct
from prometheus_client.core import CounterMetricFamily, Metric

from quire.core.wire.protocol import FinishReason
from quire.frontend.metrics.families import Labelled
from quire.frontend.metrics.histogram import Histogram

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
COMPLETIONS = (1, 2, 5, 10, 20)
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)

QUEUE_LIMITS = ("max_num_queued_reqs", "max_num_queued_tokens", "max_num_queued_bytes", "max_queue_seconds")
"""Limits of the scheduler for which a request is turned away."""


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


def length_bounds(longest: int) -> list[int]:
    """1, 2, 5, 10, 20, 50 ... up to `longest` tokens."""
    bounds, unit = [], 1
    while unit <= longest:
        bounds += [unit * step for step in (1, 2, 5) if unit * step <= longest]
        unit *= 10
    return bounds or [1]


class RequestMetrics:
    """The metrics of the requests that a frontend gave to one engine.

    Args:
        families: makes families with the engine's labels.
        max_model_len: the largest bucket of length histograms, in tokens.
    """

    def __init__(self, families: Labelled, max_model_len: int) -> None:
        self._families = families
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generation_tokens = 0
        self.media_queries = 0
        self.media_hits = 0
        self.rejections = dict.fromkeys(QUEUE_LIMITS, 0)
        self._finished = dict.fromkeys(FinishReason, 0)
        lengths = length_bounds(max_model_len)
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

    def on_first_tokens(self, num_tokens: int, seconds: float, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """Counts a sequence's first `num_tokens` output tokens, `seconds` after the request arrived."""
        self.generation_tokens += num_tokens
        self.prompt_tokens += num_prompt_tokens
        self.cached_tokens += num_cached_tokens
        self._ttft.observe(seconds)

    def on_prompt(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """Counts the prompt of a request whose output is no tokens."""
        self.prompt_tokens += num_prompt_tokens
        self.cached_tokens += num_cached_tokens

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

    def on_rejected(self, limit: str) -> None:
        """Counts a request that was refused because the queue has reached one of `QUEUE_LIMITS`."""
        self.rejections[limit] += 1

    def on_item(self, is_found: bool) -> None:
        """Counts an image, video or sound of a prompt: whether it had been processed before, and was kept."""
        self.media_queries += 1
        self.media_hits += is_found

    def collect(self) -> Iterator[Metric]:
        """Yields the families for one scrape."""
        computed = self.prompt_tokens - self.cached_tokens
        sources = {"local_compute": computed, "local_cache_hit": self.cached_tokens, "external_kv_transfer": 0}
        finished = {str(reason): count for reason, count in self._finished.items()}
        for name, text, value in (
            ("vllm:prompt_tokens_total", "Prompt tokens of requests that began to answer.", self.prompt_tokens),
            ("vllm:prompt_tokens_cached_total", "Prompt tokens that came from a cache.", self.cached_tokens),
            ("vllm:generation_tokens_total", "Tokens generated.", self.generation_tokens),
            (
                "vllm:mm_cache_queries_total",
                "Items of prompts looked up among those kept.",
                self.media_queries,
            ),
            ("vllm:mm_cache_hits_total", "Items of prompts found among those kept.", self.media_hits),
        ):
            yield self._families.counter(name, text, value)
        for name, text, values, label in (
            ("vllm:prompt_tokens_by_source_total", "Prompt tokens, by where they came from.", sources, "source"),
            ("vllm:request_success_total", "Finished sequences, by how they ended.", finished, "finished_reason"),
        ):
            yield self._families.counter(name, text, values, label)
        rejected = "Requests turned away with 429, by the limit they met."
        rejections = CounterMetricFamily("vllm:admission_rejections_total", rejected, labels=["model_name", "reason"])
        for limit, count in self.rejections.items():
            rejections.add_metric([self._families.labels["model_name"], limit], count)
        yield rejections
        for name, text, histogram in self._histograms():
            yield self._families.histogram(name, text, histogram)

    def _histograms(self) -> tuple[tuple[str, str, Histogram], ...]:
        between = "Seconds between output tokens of a sequence."
        return (
            ("vllm:time_to_first_token_seconds", "Seconds from arrival to the first token.", self._ttft),
            ("vllm:inter_token_latency_seconds", between, self._inter_token),
            ("vllm:request_time_per_output_token_seconds", "A sequence's mean of those.", self._per_output_token),
            ("vllm:e2e_request_latency_seconds", "Seconds from arrival to the end.", self._e2e),
            ("vllm:request_queue_time_seconds", "Seconds in the queue.", self._queue),
            ("vllm:request_inference_time_seconds", "Seconds from first step to last token.", self._inference),
            ("vllm:request_prefill_time_seconds", "Seconds from first step to first token.", self._prefill),
            ("vllm:request_decode_time_seconds", "Seconds from first to last token.", self._decode),
            ("vllm:request_prompt_tokens", "Prompt tokens.", self._prompt_length),
            ("vllm:request_generation_tokens", "Output tokens.", self._generation_length),
            ("vllm:request_prefill_kv_computed_tokens", "Prompt tokens not found in a cache.", self._computed_length),
            ("vllm:request_max_num_generation_tokens", "Longest output of a request.", self._longest_generation),
            ("vllm:request_params_n", "n of requests.", self._params_n),
            ("vllm:request_params_max_tokens", "max_tokens of requests.", self._params_max_tokens),
            ("vllm:request_num_preemptions", "Preemptions of a sequence.", self._request_preemptions),
        )
