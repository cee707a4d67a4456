"""The statistics that one engine reports for all its frontends."""

import time
from collections.abc import Callable, Iterator

from prometheus_client.core import Metric

from quire.core.engine.fleet_status import EngineStatus
from quire.core.wire.protocol import SchedulerStats
from quire.frontend.metrics.families import Labelled
from quire.frontend.metrics.histogram import Histogram

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class EngineStatistics:
    """The statistics of one engine. All its frontends get the same, so a sum over frontends must take one frontend's.

    Args:
        families: makes families with the engine's labels.
        cache_info: labels of `vllm:cache_config_info`: facts about the KV cache.
        max_adapters: in one step; 0: the engine takes none.

    Attributes:
        status: asks for the engine's state; None where nobody knows it.
    """

    def __init__(self, families: Labelled, cache_info: dict[str, str] | None = None, *, max_adapters: int = 0) -> None:
        self._families = families
        self._max_adapters = max_adapters
        self.cache_info = cache_info or {}
        self.status: Callable[[], EngineStatus] | None = None
        self.stats = SchedulerStats()  # the latest gauges
        self.computed_prompt_tokens = 0  # as chunks are done
        self.generated_tokens = 0
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self.num_preemptions = 0
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_by_position: list[int] = []
        self._step_tokens = Histogram(STEP_TOKENS)

    @property
    def label(self) -> str:
        """The engine's number among all."""
        return self._families.labels["engine"]

    @property
    def num_accepted_tokens(self) -> int:
        """Drafts that were right."""
        return sum(self.num_accepted_by_position)

    def on_stats(self, stats: SchedulerStats) -> None:
        """Takes statistics of a step, a refusal or a heartbeat. An engine that was started again counts from zero."""
        before = self.stats if stats.started_at == self.stats.started_at else SchedulerStats()
        self.stats = stats
        self.prefix_cache_queries += stats.prefix_cache_queries - before.prefix_cache_queries
        self.prefix_cache_hits += stats.prefix_cache_hits - before.prefix_cache_hits
        self.num_preemptions += stats.num_preemptions - before.num_preemptions
        self.computed_prompt_tokens += stats.num_prompt_tokens - before.num_prompt_tokens
        self.num_drafts += stats.num_drafts - before.num_drafts
        self.num_draft_tokens += stats.num_draft_tokens - before.num_draft_tokens
        counts, older = self.num_accepted_by_position, before.num_accepted_by_position
        counts += [0] * (len(stats.num_accepted_by_position) - len(counts))
        for place, count in enumerate(stats.num_accepted_by_position):
            counts[place] += count - (older[place] if place < len(older) else 0)
        num_generated = stats.num_generated_tokens - before.num_generated_tokens
        self.generated_tokens += num_generated
        num_steps = stats.num_steps - before.num_steps  # more than one when this frontend has just come
        if num_steps:
            num_prefilled = stats.num_prefilled_tokens - before.num_prefilled_tokens
            self._step_tokens.observe((num_prefilled + num_generated) / num_steps, num_steps)

    def collect(self) -> Iterator[Metric]:
        """Yields the families for one scrape."""
        stats, families = self.stats, self._families
        yield families.gauge("vllm:num_requests_running", "Requests in the running batch.", stats.num_running)
        yield families.gauge("vllm:num_requests_waiting", "Requests in the queue.", stats.num_waiting)
        yield families.gauge(
            "vllm:num_requests_waiting_by_reason",
            "Requests in the queue, by what they wait for.",
            {"capacity": stats.num_waiting, "deferred": 0},
            "reason",
        )
        yield families.gauge(
            "vllm:kv_cache_usage_perc", "Share of KV-cache pages in use; 1 is full.", stats.kv_cache_usage
        )
        yield families.gauge(
            "vllm:engine_sleep_state",
            "1 for the state the engine is in.",
            {"awake": 1, "weights_offloaded": 0, "discard_all": 0},
            "sleep_state",
        )
        yield families.info("vllm:cache_config_info", "Facts about the KV cache, as labels.", self.cache_info, 1)
        looked_up, found = "Prompt tokens looked up in the prefix cache.", "Prompt tokens found in the prefix cache."
        for name, text, value in (
            ("vllm:prefix_cache_queries_total", looked_up, self.prefix_cache_queries),
            ("vllm:prefix_cache_hits_total", found, self.prefix_cache_hits),
            ("vllm:external_prefix_cache_queries_total", "Tokens looked up in caches of other engines.", 0),
            ("vllm:external_prefix_cache_hits_total", "Tokens found in caches of other engines.", 0),
            ("vllm:num_preemptions_total", "Times that a request lost its pages to another.", self.num_preemptions),
            ("vllm:spec_decode_num_drafts_total", "Rows whose drafts were checked.", self.num_drafts),
            ("vllm:spec_decode_num_draft_tokens_total", "Drafts that were checked.", self.num_draft_tokens),
            ("vllm:spec_decode_num_accepted_tokens_total", "Drafts that were right.", self.num_accepted_tokens),
        ):
            yield families.counter(name, text, value)
        right = {str(place): count for place, count in enumerate(self.num_accepted_by_position)}
        yield families.counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos_total", "Drafts that were right, by place.", right, "position"
        )
        places = {"device": self.prefix_cache_hits, "host": 0, "p2p": 0, "disk": 0, "external_unspecified": 0}
        yield families.counter(
            "vllm:prompt_tokens_cached_by_source_total", "Tokens found in a cache, by its place.", places, "source"
        )
        yield families.histogram(
            "vllm:iteration_tokens_total", "Tokens a step generated, and those of prompts it ended.", self._step_tokens
        )
        if self._max_adapters:
            names = {
                "max_lora": str(self._max_adapters),
                "waiting_lora_adapters": ",".join(stats.waiting_adapters),
                "running_lora_adapters": ",".join(stats.running_adapters),
            }
            text = "Adapters of running and waiting requests, as labels; the time at which they were read."
            yield families.info("vllm:lora_requests_info", text, names, time.time())
        if stats.expert_balancedness is not None:
            text = (
                "Mean load of the ranks of experts over the busiest's, in the last window that EPLB counted; 1 is best."
            )
            yield families.gauge("quire:expert_balancedness", text, stats.expert_balancedness)
        if self.status is not None:
            yield from self._state(self.status())

    def _state(self, status: EngineStatus) -> Iterator[Metric]:
        families, is_up = self._families, status.state == "serving"
        yield families.gauge("quire:engine_up", "1 while the engine serves, 0 while it starts or is gone.", is_up)
        restarts = "Times that the engine was started again."
        yield families.counter("quire:engine_restarts_total", restarts, status.restarts)
        if status.waits_for is not None:
            text = "1 while the engine waits for what its label names, such as another host."
            yield families.info("quire:engine_waits_for", text, {"waits_for": status.waits_for}, 1)
