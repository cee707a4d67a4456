"""Metrics have the names that dashboards use, and the right values."""

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from quire.core.engine.fleet_status import EngineStatus
from quire.core.wire.protocol import FinishReason, SchedulerStats
from quire.frontend.metrics.histogram import Histogram
from quire.frontend.metrics.metrics import Metrics
from quire.frontend.metrics.request_metrics import FinishedRequest, length_bounds
from quire.frontend.metrics.stats_log import StatsLog

NAMES = {
    "counter": """prefix_cache_queries prefix_cache_hits
        external_prefix_cache_queries external_prefix_cache_hits mm_cache_queries mm_cache_hits num_preemptions
        prompt_tokens prompt_tokens_by_source prompt_tokens_cached prompt_tokens_cached_by_source generation_tokens
        request_success admission_rejections""",
    "gauge": """num_requests_running num_requests_waiting num_requests_waiting_by_reason engine_sleep_state
        kv_cache_usage_perc cache_config_info""",
    "histogram": """iteration_tokens_total time_to_first_token_seconds inter_token_latency_seconds
        request_time_per_output_token_seconds e2e_request_latency_seconds
        request_queue_time_seconds request_inference_time_seconds request_prefill_time_seconds
        request_decode_time_seconds request_prompt_tokens request_generation_tokens
        request_max_num_generation_tokens request_params_n request_params_max_tokens request_num_preemptions
        request_prefill_kv_computed_tokens""",
}


@pytest.fixture
def metrics() -> Metrics:
    found = Metrics("tiny", 1000)
    found.engines[0].cache_info = {"block_size": "16"}
    return found


def scrape(metrics: Metrics) -> dict[str, float]:
    """Sample values by `name{extra labels}`; every sample must carry the two common labels."""
    registry = CollectorRegistry()
    registry.register(metrics)
    values = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "tiny"
            if family.name != "vllm:admission_rejections":
                assert labels.pop("engine") == "0"
            shown = ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
            values[f"{sample.name}{{{shown}}}" if shown else sample.name] = sample.value
    return values


def finished(**changes: object) -> FinishedRequest:
    times = {
        "arrived_at": 100.0,
        "queued_at": 100.5,
        "scheduled_at": 101.5,
        "first_token_at": 102.0,
        "last_token_at": 104.0,
        "finished_at": 104.25,
    }
    counts = {"num_prompt_tokens": 50, "num_generation_tokens": 5, "num_cached_tokens": 32, "num_preemptions": 1}
    return FinishedRequest(**{"finish_reason": FinishReason.STOP, **times, **counts, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", NAMES)
def test_every_name_is_there_with_its_type(metrics: Metrics, kind: str) -> None:
    types = {family.name: family.type for family in metrics.collect()}
    for name in NAMES[kind].split():
        assert types.pop(f"vllm:{name}") == kind


def test_counters_end_in_total(metrics: Metrics) -> None:
    metrics.requests[0].on_first_tokens(1, 0.5, 10, 4)
    metrics.requests[0].on_tokens(3, 0.1)
    values = scrape(metrics)
    assert values["vllm:generation_tokens_total"] == 4
    assert values["vllm:prompt_tokens_total"] == 10
    assert values["vllm:prompt_tokens_cached_total"] == 4
    assert values["vllm:prompt_tokens_by_source_total{source=local_compute}"] == 6
    assert values["vllm:prompt_tokens_by_source_total{source=local_cache_hit}"] == 4
    assert values["vllm:time_to_first_token_seconds_count"] == 1
    assert values["vllm:inter_token_latency_seconds_sum"] == pytest.approx(0.1)


def totals(num_steps: int, started_at: float = 1.0) -> SchedulerStats:
    """Of an engine that did the same in each step."""
    return SchedulerStats(3, 2, 0.25, started_at, *(num_steps * each for each in (20, 16, 1, 1, 25, 30, 10)))


def test_scheduler_stats_set_gauges_and_add_to_counters(metrics: Metrics) -> None:
    metrics.on_stats(0, totals(1))
    metrics.on_stats(0, totals(1))  # a heartbeat: nothing happened since
    metrics.on_stats(0, totals(2))
    values = scrape(metrics)
    assert values["vllm:num_requests_running"] == 3
    assert values["vllm:num_requests_waiting"] == 2
    assert values["vllm:num_requests_waiting_by_reason{reason=capacity}"] == 2
    assert values["vllm:kv_cache_usage_perc"] == 0.25
    assert values["vllm:prefix_cache_queries_total"] == 40
    assert values["vllm:prefix_cache_hits_total"] == 32
    assert values["vllm:prompt_tokens_cached_by_source_total{source=device}"] == 32
    assert values["vllm:num_preemptions_total"] == 2
    assert values["vllm:iteration_tokens_total_count"] == 2
    assert values["vllm:iteration_tokens_total_bucket{le=32.0}"] == 0
    assert values["vllm:iteration_tokens_total_bucket{le=64.0}"] == 2


def test_counters_go_on_when_another_engine_counts_from_zero(metrics: Metrics) -> None:
    metrics.on_stats(0, totals(5, started_at=7.0))
    metrics.on_stats(0, SchedulerStats())  # the next one speaks before it is ready
    metrics.on_stats(0, totals(2, started_at=9.0))
    values = scrape(metrics)
    assert values["vllm:prefix_cache_queries_total"] == 7 * 20
    assert values["vllm:num_preemptions_total"] == 7
    assert values["vllm:iteration_tokens_total_count"] == 7


def test_a_frontend_that_comes_late_counts_all_steps(metrics: Metrics) -> None:
    metrics.on_stats(0, totals(100))
    values = scrape(metrics)
    assert values["vllm:iteration_tokens_total_count"] == 100
    assert values["vllm:iteration_tokens_total_sum"] == 100 * 40


def test_heartbeat_without_work_is_no_iteration(metrics: Metrics) -> None:
    metrics.on_stats(0, SchedulerStats())
    assert scrape(metrics)["vllm:iteration_tokens_total_count"] == 0


def test_finished_request_is_divided_into_its_phases(metrics: Metrics) -> None:
    metrics.requests[0].on_request_finished(finished())
    values = scrape(metrics)
    expected = {
        "e2e_request_latency_seconds": 4.25,
        "request_queue_time_seconds": 1.0,
        "request_inference_time_seconds": 2.5,
        "request_prefill_time_seconds": 0.5,
        "request_decode_time_seconds": 2.0,
        "request_time_per_output_token_seconds": 0.5,
        "request_prompt_tokens": 50,
        "request_generation_tokens": 5,
        "request_prefill_kv_computed_tokens": 18,
        "request_num_preemptions": 1,
    }
    assert {name: values[f"vllm:{name}_sum"] for name in expected} == pytest.approx(expected)
    assert values["vllm:request_success_total{finished_reason=stop}"] == 1
    assert values["vllm:request_success_total{finished_reason=length}"] == 0


def test_request_aborted_in_the_queue_has_no_phases(metrics: Metrics) -> None:
    metrics.requests[0].on_request_finished(
        finished(
            finish_reason=FinishReason.ABORT,
            scheduled_at=0.0,
            first_token_at=0.0,
            last_token_at=0.0,
            num_generation_tokens=0,
        )
    )
    values = scrape(metrics)
    assert values["vllm:request_success_total{finished_reason=abort}"] == 1
    assert values["vllm:request_queue_time_seconds_count"] == 0
    assert values["vllm:request_decode_time_seconds_count"] == 0
    assert values["vllm:e2e_request_latency_seconds_count"] == 1


def test_parameters_and_rejections(metrics: Metrics) -> None:
    metrics.requests[0].on_params(4, None, 7)
    metrics.requests[0].on_params(1, 64, 3)
    metrics.requests[0].on_rejected("max_num_queued_reqs")
    values = scrape(metrics)
    assert values["vllm:request_params_n_sum"] == 5
    assert values["vllm:request_params_max_tokens_count"] == 1
    assert values["vllm:request_max_num_generation_tokens_sum"] == 10
    assert values["vllm:admission_rejections_total{reason=max_num_queued_reqs}"] == 1


def test_info_metrics_carry_their_facts_as_labels(metrics: Metrics) -> None:
    assert scrape(metrics)["vllm:cache_config_info{block_size=16}"] == 1


def test_histogram_counts_a_bound_into_its_own_bucket() -> None:
    histogram = Histogram((1, 2, 5))
    for value in (0.5, 1, 1.5, 2, 9):
        histogram.observe(value)
    assert histogram.buckets() == [("1.0", 2), ("2.0", 4), ("5.0", 4), ("+Inf", 5)]
    assert histogram.sum == 14


def test_length_buckets_stop_at_the_model_length() -> None:
    assert length_bounds(120) == [1, 2, 5, 10, 20, 50, 100]
    assert length_bounds(2048)[-1] == 2000


def test_stats_line_tells_what_changed_and_then_falls_silent(metrics: Metrics) -> None:
    log = StatsLog(metrics.engines)
    assert log.next_lines(10.0) == []
    metrics.requests[0].on_first_tokens(1, 0.1, 500, 401)
    metrics.on_stats(
        0,
        SchedulerStats(
            num_running=1,
            kv_cache_usage=0.5,
            prefix_cache_queries=100,
            prefix_cache_hits=25,
            num_prompt_tokens=99,
            num_generated_tokens=1,
        ),
    )
    [line] = log.next_lines(10.0)
    for words in ("prompt 9.9 tokens/s", "output 0.1 tokens/s", "running 1", "KV cache 50.0%", "hits 25.0%"):
        assert words in line
    metrics.on_stats(0, msgspec.structs.replace(metrics.engines[0].stats, num_running=0, kv_cache_usage=0.0))
    assert "running 0" in log.next_lines(10.0)[0]
    assert log.next_lines(10.0) == []


def test_a_long_prompt_shows_in_the_line_while_it_is_computed(metrics: Metrics) -> None:
    log = StatsLog(metrics.engines)
    for num_chunks in (1, 2, 3):
        metrics.on_stats(0, SchedulerStats(num_running=1, num_prompt_tokens=2000 * num_chunks))
        assert "prompt 200.0 tokens/s" in log.next_lines(10.0)[0]
    values = scrape(metrics)  # counted with the first token, as vLLM does
    assert (values["vllm:prompt_tokens_total"], values["vllm:iteration_tokens_total_count"]) == (0, 0)


def test_several_engines_are_told_apart_and_what_is_of_none_is_added_up() -> None:
    metrics = Metrics("tiny", 1000, [2, 3])
    for number in (0, 1):
        metrics.on_stats(number, totals(number + 1))
        metrics.requests[number].on_first_tokens(10 * (number + 1), 0.5, 10, 4)
        metrics.requests[number].on_rejected("max_num_queued_reqs")
    families = {family.name: family for family in metrics.collect()}
    for name, values in (("generation_tokens", [10, 20]), ("prefix_cache_hits", [16, 32])):
        found = {each.labels["engine"]: each.value for each in families[f"vllm:{name}"].samples}
        assert found == dict(zip(["2", "3"], values, strict=True))
    assert [each.value for each in families["vllm:admission_rejections"].samples] == [2, 0, 0, 0]
    lines = StatsLog(metrics.engines)
    metrics.on_stats(1, totals(3))
    assert [line.split(" ", 3)[:2] for line in lines.next_lines(10.0)] == [["engine", "2:"], ["engine", "3:"]]
    assert "running 6, waiting 4" in StatsLog(metrics.engines, aggregate=True).next_lines(10.0)[0]


def test_the_balance_of_experts_is_told_where_it_is_measured(metrics: Metrics) -> None:
    name = "quire:expert_balancedness"
    metrics.on_stats(0, SchedulerStats())
    assert name not in scrape(metrics)
    metrics.on_stats(0, SchedulerStats(expert_balancedness=0.8))
    assert scrape(metrics)[name] == 0.8


def test_what_an_engine_waits_for_is_told(metrics: Metrics) -> None:
    up, waits = "quire:engine_up", "quire:engine_waits_for{waits_for=node 1 of 2}"
    assert up not in scrape(metrics)
    status = EngineStatus("restarting", None, "It was killed.", "node 1 of 2")
    metrics.engines[0].status = lambda: status
    assert (scrape(metrics)[up], scrape(metrics)[waits]) == (0, 1)
    status = EngineStatus("serving", 0.5)
    assert (scrape(metrics)[up], waits in scrape(metrics)) == (1, False)
