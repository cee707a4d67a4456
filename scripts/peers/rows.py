"""The rows of the comparison: what is run, what is read off, and what Quire wants to reach."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines import MAX_MODEL_LEN, Engine, LlamaCpp, ServingEngine, Vllm

LARGE, SMALL = "qwen3-0.6b-shape", "llama-tiny"

Figures = dict[str, float]
"""By metric; the unit is in the name."""


@dataclass(frozen=True)
class Bench:
    """What measuring needs besides the engine.

    Args:
        client: puts load on any server.
        smoke: tiny sizes on the small model, to see that every command works.
        run: number of the run; seeds differ, so that no prompt comes twice.
    """

    models: Path
    client: Vllm
    smoke: bool
    run: int = 0

    def model(self, name: str) -> Path:
        return self.models / (SMALL if self.smoke else name)

    def size(self, full: int, smoke: int) -> int:
        return smoke if self.smoke else full


@dataclass(frozen=True)
class Row:
    name: str
    title: str
    measure: Callable[[Any, Bench], Figures]
    reach: dict[str, str]  # by metric
    served: bool = True  # else every engine takes part


def offline(num: int, input_len: int, output_len: int) -> Callable[[Engine, Bench], Figures]:
    """Output tokens per second of all requests at once."""

    def measure(engine: Engine, bench: Bench) -> Figures:
        model = bench.models / LARGE if isinstance(engine, LlamaCpp) else bench.model(LARGE)  # its converter knows one
        sizes = bench.size(num, min(num, 4)), bench.size(input_len, 16), bench.size(output_len, 4)
        return {"output tok/s": engine.output_rate(model, *sizes)}

    return measure


def served(engine: ServingEngine, bench: Bench) -> Figures:
    """64 streams on the small model."""
    figures = _random_load(engine, bench, SMALL, bench.size(64, 4), bench.size(256, 8), 64, 64)
    return {
        "output tok/s": figures["output_throughput"],
        "median time to first token, ms": figures["median_ttft_ms"],
        "P99 inter-token latency, ms": figures["p99_itl_ms"],
    }


def served_one(engine: ServingEngine, bench: Bench) -> Figures:
    """One stream on the small model."""
    figures = _random_load(engine, bench, SMALL, 1, bench.size(16, 2), 64, 64)
    return {
        "median time per output token, ms": figures["median_tpot_ms"],
        "median time to first token, ms": figures["median_ttft_ms"],
    }


def shared_prefix(engine: ServingEngine, bench: Bench) -> Figures:
    """One request fills the cache; then 32 with the same prefix arrive at once."""
    model = bench.model(LARGE)
    flags = ["--dataset-name", "prefix_repetition", "--prefix-repetition-num-prefixes", "1"]
    flags += ["--prefix-repetition-prefix-len", str(bench.size(2000, 100)), "--prefix-repetition-suffix-len", "16"]
    flags += ["--prefix-repetition-output-len", "2", "--disable-shuffle", "--seed", str(bench.run)]
    with engine.server(model) as server:
        bench.client.load(server, model, [*flags, "--num-prompts", "1"])
        figures = bench.client.load(server, model, [*flags, "--num-prompts", str(bench.size(32, 4))])
    return {"time to last first token, ms": max(figures["ttfts"]) * 1000}


def startup(name: str) -> Callable[[ServingEngine, Bench], Figures]:
    """From the start of the process to an answer. Compilation is left out where it can be."""

    def measure(engine: ServingEngine, bench: Bench) -> Figures:
        with engine.server(bench.model(name), quick_start=True) as server:
            healthy = time.perf_counter() - server.started_at
            server.complete()
            return {"to first answer, s": time.perf_counter() - server.started_at, "to health, s": healthy}

    return measure


def memory(engine: ServingEngine, bench: Bench) -> Figures:
    """Resident memory without weights and cache.

    What of a cache is resident differs, so it is measured at two sizes and extrapolated to none.
    """
    model = bench.model(LARGE)
    weights = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    resident = []
    for cache_gib in (1, 2):
        with engine.server(model, cache_gib=cache_gib) as server:
            server.complete(8)
            resident.append(server.resident_bytes())
    return {"beyond weights and cache, GB": (2 * resident[0] - resident[1] - weights) / 1e9}


def long_context(engine: ServingEngine, bench: Bench) -> Figures:
    """One stream's time per output token at two context lengths.

    Between events, not from the first to the last: some tokens make no text, so the first event may come late.
    """
    lengths = bench.size(1000, 50), bench.size(32000, 500)
    short, long = (
        _random_load(engine, bench, LARGE, 1, 1, length, bench.size(64, 16))["median_itl_ms"] for length in lengths
    )
    return {"time per token at 1k, ms": short, "time per token at 32k, ms": long, "growth, ms": long - short}


def _random_load(
    engine: ServingEngine, bench: Bench, name: str, streams: int, num: int, input_len: int, output_len: int
) -> dict[str, Any]:
    model = bench.model(name)
    flags = ["--dataset-name", "random", "--random-input-len", str(input_len), "--random-output-len", str(output_len)]
    flags += ["--num-prompts", str(num), "--max-concurrency", str(streams), "--metric-percentiles", "99"]
    if num == 1:  # a client reads its very first stream late; the prompt is cached then, its decode steps are the same
        flags += ["--num-warmups", "1"]
    with engine.server(model, max_model_len=max(MAX_MODEL_LEN, input_len + output_len + 64)) as server:
        server.complete(8)
        if num > 1:  # a server's first batch of a size costs more than the next
            bench.client.load(server, model, [*flags, "--seed", str(1000 + bench.run)])
        return bench.client.load(server, model, [*flags, "--seed", str(bench.run)])


KV_BYTES = 2 * 28 * 8 * 128 * 2  # of a token: keys and values, layers, heads, size, bf16
GROWTH_GB = KV_BYTES * 31000 / 1e9

ROWS = [
    Row(
        "offline-128-64",
        f"offline, {LARGE}, 32 requests 128/64",
        offline(32, 128, 64),
        {"output tok/s": "≥ 2.3 × vLLM, ≥ 2.1 × llama.cpp"},
        served=False,
    ),
    Row("offline-512-32", "– the same, 512/32", offline(32, 512, 32), {"output tok/s": "≥ 2 × each"}, served=False),
    Row("offline-16-256", "– the same, 16/256", offline(32, 16, 256), {"output tok/s": "≥ 2 × each"}, served=False),
    Row(
        "stream-128-64", "one stream, 128/64", offline(1, 128, 64), {"output tok/s": "≥ 1.2 × llama.cpp"}, served=False
    ),
    Row(
        "served-64",
        f"served, {SMALL}, 64 streams 64/64",
        served,
        {
            "output tok/s": "≥ 3 ×",
            "median time to first token, ms": "≤ 0.5 ×",
            "P99 inter-token latency, ms": "≤ 0.5 ×",
        },
    ),
    Row("served-1", f"served, {SMALL}, one stream 64/64", served_one, {"median time per output token, ms": "≤ 0.4 ×"}),
    Row(
        "prefix",
        f"a cached 2,000-token prefix, {LARGE}, 32 requests",
        shared_prefix,
        {"time to last first token, ms": "≤ 0.5 ×"},
    ),
    Row("startup-tiny", f"start of a server, {SMALL}", startup(SMALL), {"to first answer, s": "≤ 3 s"}),
    Row("startup-0.6b", f"start of a server, {LARGE}", startup(LARGE), {"to first answer, s": "≤ 4 s"}),
    Row(
        "memory",
        f"resident memory of all processes, {LARGE}",
        memory,
        {"beyond weights and cache, GB": "≤ 0.5 GB"},
    ),
    Row(
        "context-32k",
        f"decode at 1k and 32k tokens of context, {LARGE}",
        long_context,
        {"growth, ms": f"no worse than reading {GROWTH_GB:.1f} GB"},
    ),
]
