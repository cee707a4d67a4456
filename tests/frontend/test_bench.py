"""Benchmarks: the arithmetic of their figures, their requests, and each command against the real thing."""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.core.errors import ConfigError
from quire.frontend.bench.dataset import random_requests
from quire.frontend.bench.figures import RequestTiming, summarize
from quire.frontend.tokenizer import Tokenizer
from tests.servers import ServerProcess


def dataset_args(**changes: object) -> argparse.Namespace:
    given = {
        "num_prompts": 20, "random_input_len": 50, "random_output_len": 10, "random_range_ratio": 0.0,
        "random_prefix_len": 0, "input_len": None, "output_len": None,
    }  # fmt: skip
    return argparse.Namespace(**(given | changes))


def quire(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "quire", *arguments], capture_output=True, text=True, timeout=120)


def test_random_requests_repeat_with_their_seed() -> None:
    assert random_requests(dataset_args(), 300, 1) == random_requests(dataset_args(), 300, 1)
    assert random_requests(dataset_args(), 300, 1) != random_requests(dataset_args(), 300, 2)


def test_lengths_follow_the_range_and_the_shared_prefix() -> None:
    requests = random_requests(dataset_args(random_range_ratio=0.2, random_prefix_len=7, num_prompts=200), 300, 0)
    lengths = {len(request.prompt_token_ids) - 7 for request in requests}
    assert min(lengths) == 40
    assert max(lengths) == 60
    assert {8, 12} <= {request.output_len for request in requests} <= set(range(8, 13))
    assert len({tuple(request.prompt_token_ids[:7]) for request in requests}) == 1


def test_text_prompts_tokenize_to_what_is_counted(checkpoint: Callable[..., Path]) -> None:
    tokenizer = Tokenizer.from_folder(checkpoint("llama"))
    for request in random_requests(dataset_args(), tokenizer.vocab_size, 0, tokenizer):
        assert tokenizer.encode(request.prompt, add_special_tokens=False) == request.prompt_token_ids
        assert 40 <= len(request.prompt_token_ids) <= 60


def test_impossible_dataset_is_refused() -> None:
    with pytest.raises(ConfigError, match="--random-range-ratio"):
        random_requests(dataset_args(random_range_ratio=1.5), 300, 0)


def test_figures_are_those_of_the_timings() -> None:
    timings = [
        RequestTiming(prompt_tokens=10, output_tokens=5, ttft=0.1, latency=0.5, gaps=[0.1] * 4),
        RequestTiming(prompt_tokens=20, output_tokens=3, ttft=0.3, latency=0.9, gaps=[0.3] * 2),
        RequestTiming(prompt_tokens=30, error="503"),
    ]
    figures = summarize(timings, duration=2.0, percentiles=[50, 99])
    assert figures["completed"] == 2
    assert figures["failed"] == 1
    assert figures["output_throughput"] == 4.0
    assert figures["total_token_throughput"] == 19.0
    assert figures["mean_ttft_ms"] == pytest.approx(200)
    assert figures["mean_tpot_ms"] == pytest.approx((100 + 300) / 2)
    assert figures["median_itl_ms"] == pytest.approx(100)
    assert figures["p50_e2el_ms"] == pytest.approx(700)


def test_throughput_and_latency_count_what_they_ran(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    done = quire(
        "bench", "throughput", "--model", str(checkpoint("llama")), "--num-prompts", "5", "--input-len", "20",
        "--output-len", "6", "--n", "2", "--output-json", str(out),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (100, 60)
    assert figures["output_tokens_per_second"] == pytest.approx(60 / figures["elapsed_time"])
    assert "Output tokens per second" in done.stdout

    done = quire(
        "bench", "latency", "--model", str(checkpoint("llama")), "--input-len", "8", "--output-len", "4",
        "--batch-size", "2", "--num-iters-warmup", "1", "--num-iters", "3", "--output-json", str(out),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(json.loads(out.read_text())["latencies"]) == 3


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_serve_loads_a_running_server(server: ServerProcess, tmp_path: Path, backend: str) -> None:
    out = tmp_path / "figures.json"
    done = quire(
        "bench", "serve", "--base-url", server.base_url, "--backend", backend, "--num-prompts", "6", "--input-len",
        "12", "--output-len", "5", "--max-concurrency", "3", "--ignore-eos", "--request-rate", "50", "--output-json",
        str(out), "--disable-tqdm",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())
    assert (figures["completed"], figures["total_output_tokens"]) == (6, 30)
    assert 0 < figures["median_ttft_ms"] <= figures["median_e2el_ms"]


def test_serve_without_a_server_says_how_to_start_one() -> None:
    done = quire("bench", "serve", "--base-url", "http://127.0.0.1:9", "--num-prompts", "1")
    assert done.returncode == 1
    assert "quire serve" in done.stderr
    assert "Traceback" not in done.stderr


def test_startup_measures_both_moments(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    done = quire(
        "bench", "startup", "--model", str(checkpoint("llama")), "--num-iters-cold", "0", "--num-iters-warmup", "0",
        "--num-iters-warm", "1", "--output-json", str(out),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())
    assert 0 < figures["warm_healthy_seconds"] < figures["warm_first_answer_seconds"]
