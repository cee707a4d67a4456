"""Computes the figures of a run."""

from typing import Any

import numpy as np

from quire.frontend.labs.fleet.simulation import Run, Tracked

PERCENTILE = 99


def figures(run: Run) -> dict[str, Any]:
    """Under plain names; seconds are virtual, but for the router's."""
    requests = run.requests
    prompt_tokens = sum(len(each.arrival.prompt) for each in requests)
    busy = [each for each in run.busy if each.sum()]
    return {
        "requests": len(requests),
        "failed": sum(each.failed is not None for each in requests),
        "unanswered": sum(each.done_at is None for each in requests),
        "short": sum(len(each.delivered) != each.arrival.output_len for each in requests),
        "moved": sum(each.num_moves > 0 for each in requests),
        "seconds": run.seconds,
        "router_us_mean": _mean(run.route_seconds) * 1e6,
        "router_us_p99": _percentile(run.route_seconds) * 1e6,
        "hit_rate": sum(each.num_cached for each in requests) / max(1, prompt_tokens),
        "possible_hit_rate": sum(each.arrival.num_repeated for each in requests) / max(1, prompt_tokens),
        "imbalance": _mean([each.max() / each.mean() for each in busy]),
        "ttft_mean": _mean(_ttft(requests)),
        "ttft_p99": _percentile(_ttft(requests)),
        "moved_seconds_mean": _mean(_seconds([each for each in requests if each.num_moves])),
        "request_seconds_mean": _mean(_seconds(requests)),
        "request_seconds_p99": _percentile(_seconds(requests)),
    }


def _ttft(requests: list[Tracked]) -> list[float]:
    return [each.first_token_at - each.arrival.at for each in requests if each.first_token_at is not None]


def _seconds(requests: list[Tracked]) -> list[float]:
    return [each.done_at - each.arrival.at for each in requests if each.done_at is not None]


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else 0.0


def _percentile(values: list[float]) -> float:
    return float(np.percentile(values, PERCENTILE)) if values else 0.0
