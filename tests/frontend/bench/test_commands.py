"""Benchmarks: the arithmetic of their figures, their requests, and each command with a real engine or server."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.core.errors import ConfigError
from quire.frontend.bench.figures import RequestTiming, summarize
from quire.frontend.bench.goodput import parse_objectives, request_goodput
from quire.frontend.bench.memory import checkpoint_bytes
from quire.frontend.cli.main import main
from tests.commands import quire
from tests.frontend.text.python_tokenizers import own_code
from tests.servers import ServerProcess

pytestmark = pytest.mark.turns(4, among="whole systems")


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


def test_goodput_counts_the_requests_that_met_every_objective() -> None:
    timings = [
        RequestTiming(prompt_tokens=1, output_tokens=5, ttft=0.1, latency=0.5),
        RequestTiming(prompt_tokens=1, output_tokens=5, ttft=0.3, latency=0.5),
        RequestTiming(prompt_tokens=1, output_tokens=1, ttft=0.1, latency=0.1),
        RequestTiming(prompt_tokens=1, error="503"),
    ]
    assert request_goodput(timings, parse_objectives(["ttft:200"]), 2.0) == 1.0
    assert request_goodput(timings, parse_objectives(["ttft:200", "tpot:50"]), 2.0) == 0.5
    for wrong in ("itl:5", "ttft", "ttft:fast", "tpot:-1"):
        with pytest.raises(ConfigError, match="--goodput"):
            parse_objectives([wrong])


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
        str(out), "--disable-tqdm", "--goodput", "ttft:60000", "e2el:60000", "--save-result", "--save-detailed",
        "--result-dir", str(tmp_path / "saved"), "--label", backend, "--metadata", "host=mine",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())
    assert (figures["completed"], figures["total_output_tokens"]) == (6, 30)
    assert 0 < figures["median_ttft_ms"] <= figures["median_e2el_ms"]
    assert figures["request_goodput"] == pytest.approx(figures["request_throughput"])
    [path] = (tmp_path / "saved").glob(f"{backend}-50.0qps-concurrency3-*.json")
    saved = json.loads(path.read_text())
    assert (saved["host"], saved["max_concurrency"], saved["output_lens"]) == ("mine", 3, [5] * 6)


@pytest.mark.parametrize(
    ("backend", "num_requests", "num_texts"),
    [
        ("openai-embeddings", 3, 6),
        ("openai-embeddings-chat", 3, 6),
        ("infinity-embeddings", 3, 6),
        ("vllm-pooling", 3, 6),
        ("vllm-rerank", 3, 8),
    ],
)
def test_serve_loads_a_server_of_vectors(
    embedding_server: ServerProcess, tmp_path: Path, backend: str, num_requests: int, num_texts: int
) -> None:
    """Two texts a request; for ranks, a query with each two, or with the one that is left."""
    out = tmp_path / "figures.json"
    done = quire(
        "bench", "serve", "--base-url", embedding_server.base_url, "--backend", backend, "--num-prompts", "6",
        "--input-len", "12", "--random-batch-size", "2", "--max-concurrency", "2", "--output-json", str(out),
        "--disable-tqdm", "--goodput", "e2el:60000",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())
    assert (figures["completed"], figures["total_input_sequences"]) == (num_requests, num_texts)
    assert figures["total_input_tokens"] > 60
    assert figures["input_sequence_throughput"] == pytest.approx(
        num_texts / num_requests * figures["request_throughput"]
    )
    assert 0 < figures["median_e2el_ms"] <= figures["p99_e2el_ms"]
    assert "Texts per second" in done.stdout
    assert "first token" not in done.stdout


def test_serve_imports_a_tokenizers_code_where_it_is_trusted(
    server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tiktoken")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    (folder := tmp_path / "own").mkdir()
    own_code(folder)
    done = quire(
        "bench", "serve", "--base-url", server.base_url, "--num-prompts", "1", "--input-len", "4", "--output-len", "2",
        "--tokenizer", str(folder), "--tokenizer-mode", "auto", "--trust-remote-code", "--disable-tqdm",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_profile_of_a_load_says_where_the_timeline_went(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    profiler = json.dumps({"profiler": "timeline", "torch_profiler_dir": str(tmp_path / "traces")})
    server = ServerProcess(tmp_path, str(checkpoint("llama")), "--profiler-config", profiler).wait_until_ready()
    try:
        done = quire(
            "bench", "serve", "--base-url", server.base_url, "--num-prompts", "2", "--output-len", "7", "--num-warmups",
            "2", "--ignore-eos", "--max-concurrency", "1", "--disable-tqdm", "--profile",
        )  # fmt: skip
    finally:
        server.stop()
    assert done.returncode == 0, done.stderr
    [path] = (tmp_path / "traces").iterdir()
    assert str(path) in done.stdout
    assert num_steps(path) == 14  # of the load alone, not of the warm-up


def test_a_load_that_fails_altogether_says_why_and_sums_up_nothing(server: ServerProcess) -> None:
    done = quire("bench", "serve", "--base-url", server.base_url, "--num-prompts", "2", "--model", "absent")
    assert done.returncode == 1
    assert "All 2 requests failed; the first: " in done.stderr
    assert "absent" in done.stderr
    assert "Serving benchmark" not in done.stdout


def test_profile_of_a_server_without_a_profiler_names_the_flag(server: ServerProcess) -> None:
    done = quire("bench", "serve", "--base-url", server.base_url, "--num-prompts", "1", "--profile")
    assert done.returncode == 1
    assert "--profiler-config" in done.stderr


def test_profiles_offline(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    profiler = json.dumps({"profiler": "timeline", "torch_profiler_dir": str(tmp_path)})
    flags = ["--model", str(checkpoint("llama")), "--input-len", "8", "--output-len", "4", "--profile"]
    done = quire(
        "bench", "latency", *flags, "--batch-size", "1", "--num-iters-warmup", "1", "--profiler-config", profiler
    )
    assert done.returncode == 0, done.stderr
    [first] = tmp_path.iterdir()
    assert str(first) in done.stdout
    assert num_steps(first) == 4

    done = quire("bench", "throughput", *flags, "--num-prompts", "1", "--profiler-config", profiler)
    assert done.returncode == 0, done.stderr
    assert "Output tokens per second" in done.stdout
    [second] = set(tmp_path.iterdir()) - {first}
    assert num_steps(second) == 4

    for name in ("latency", "throughput"):
        done = quire("bench", name, *flags)
        assert done.returncode == 1
        assert "--profiler-config" in done.stderr


def num_steps(timeline: Path) -> int:
    events = json.loads(timeline.read_text())["traceEvents"]
    return sum(event["ph"] == "X" and event["name"] == "step" for event in events)


def test_serve_without_a_server_says_how_to_start_one() -> None:
    done = quire("bench", "serve", "--base-url", "http://127.0.0.1:9", "--num-prompts", "1")
    assert done.returncode == 1
    assert "quire serve" in done.stderr
    assert "Traceback" not in done.stderr


def test_startup_measures_both_moments_and_memory(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    done = quire(
        "bench", "startup", "--model", str(checkpoint("llama")), "--num-iters-cold", "0", "--num-iters-warmup", "0",
        "--num-iters-warm", "1", "--output-json", str(out),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())
    assert 0 < figures["warm_healthy_seconds"] < figures["warm_first_answer_seconds"]
    assert 0.3 < figures["warm_processor_seconds"] < 100
    folder = checkpoint("llama")
    beyond = figures["resident_mb"] - figures["resident_cache_mb"] - checkpoint_bytes(folder) / 1e6
    assert figures["resident_beyond_weights_and_cache_mb"] == pytest.approx(beyond)
    assert 60 < beyond < 3000  # at least two interpreters, one with torch
    assert "resident beyond weights and cache mb" in done.stdout


@pytest.mark.parametrize(
    ("command", "flags", "words"),
    [
        ("latency", ["--num-iters", "0"], "--num-iters: must be at least 1 (got '0')"),
        ("latency", ["--batch-size", "x"], "--batch-size: needs a whole number (got 'x')"),
        ("step", ["--batch-sizes", "1", "0"], "--batch-sizes: must be at least 1 (got '0')"),
        ("serve", ["--request-rate", "0"], "--request-rate: must be above 0 (got '0')"),
    ],
)
def test_numbers_out_of_range_are_refused(
    command: str, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", command, *flags])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
