"""The rows of the comparison: the measurements, their figures, and Quire's targets."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from engines import BF16, DEFAULTS, INT8, Q4_0, Q4_K_M, Q8_0, Batch, Engine, ServingEngine, Setting, Vllm
from processes import MeasurementError, Server
from targets import Targets, at_least, at_most

from quire.frontend.bench.memory import checkpoint_bytes

LARGE, SMALL = "qwen3-0.6b-shape", "llama-tiny"
CONTEXT_LENGTHS, CONTEXT_STEPS = (1000, 32000), 64

Figures = dict[str, float]
"""Figures by metric; the metric's name has the unit."""


@dataclass(frozen=True)
class Bench:
    """The options of a measurement besides the engine.

    Args:
        client: puts load on any server.
        smoke: use tiny sizes and the small model, to check that every command works.
        run: number of the run, which decides the seeds, so that no prompt is repeated.
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
    targets: Targets
    served: bool = True  # only serving engines take part
    setting: Setting = DEFAULTS  # only engines that can compute with it take part


def offline(
    num: int, input_len: int, output_len: int, setting: Setting = DEFAULTS
) -> Callable[[Engine, Bench], Figures]:
    """Measures output tokens per second of all requests at once."""

    def measure(engine: Engine, bench: Bench) -> Figures:
        # The converter to GGUF supports only the large model.
        model = bench.model(LARGE) if engine.serves and setting.weights == BF16 else bench.models / LARGE
        batch = Batch(bench.size(num, min(num, 4)), bench.size(input_len, 16), bench.size(output_len, 4))
        return {"output tok/s": engine.output_rate(model, setting, batch)}

    return measure


def served(engine: ServingEngine, bench: Bench) -> Figures:
    """Measures 64 streams on the small model."""
    figures = _random_load(engine, bench, SMALL, bench.size(64, 4), bench.size(256, 8), 64, 64)
    return {
        "output tok/s": figures["output_throughput"],
        "median time to first token, ms": figures["median_ttft_ms"],
        "P99 inter-token latency, ms": figures["p99_itl_ms"],
    }


def served_one(engine: ServingEngine, bench: Bench) -> Figures:
    """Measures one stream on the small model. The time of answers shows if a server sends all tokens at the end."""
    output_len = 64
    figures = _random_load(engine, bench, SMALL, 1, bench.size(16, 2), 64, output_len)
    return {
        "median time per output token, ms": figures["median_tpot_ms"],
        "median time of an answer by its tokens, ms": figures["median_e2el_ms"] / output_len,
        "median time to first token, ms": figures["median_ttft_ms"],
    }


def shared_prefix(engine: ServingEngine, bench: Bench) -> Figures:
    """Measures 32 requests that arrive at once, after one request with the same prefix has filled the cache."""
    model = bench.model(LARGE)
    flags = ["--dataset-name", "prefix_repetition", "--prefix-repetition-num-prefixes", "1"]
    flags += ["--prefix-repetition-prefix-len", str(bench.size(2000, 100)), "--prefix-repetition-suffix-len", "16"]
    flags += ["--prefix-repetition-output-len", "2", "--disable-shuffle", "--seed", str(bench.run)]
    with engine.server(model) as server:
        bench.client.load(server, model, [*flags, "--num-prompts", "1"])
        figures = bench.client.load(server, model, [*flags, "--num-prompts", str(bench.size(32, 4))])
    return {"time to last first token, ms": max(figures["ttfts"]) * 1000}


def startup(name: str) -> Callable[[ServingEngine, Bench], Figures]:
    """Measures the seconds from the start of the process to an answer, without compilation if it can be disabled."""

    def measure(engine: ServingEngine, bench: Bench) -> Figures:
        with engine.server(bench.model(name), quick_start=True) as server:
            healthy = time.perf_counter() - server.started_at
            server.complete()
            return {"to first answer, s": time.perf_counter() - server.started_at, "to health, s": healthy}

    return measure


def memory(engine: ServingEngine, bench: Bench) -> Figures:
    """Measures the resident memory of a server without weights and cache, after an answer."""
    model = bench.model(LARGE)
    return {"beyond weights and cache, GB": engine.memory_beyond(model, checkpoint_bytes(model)) / 1e9}


def long_context(engine: ServingEngine, bench: Bench) -> Figures:
    """Measures one request's time per output token after a short and a long prompt.

    The prompt is computed once, and then found in the prefix cache. The difference between the times of an answer of
    many tokens and an answer of one token is the time of the decode steps, however a server groups tokens into events.
    """
    model, steps = bench.model(LARGE), bench.size(CONTEXT_STEPS, 16)
    milliseconds = []
    for length in (bench.size(length, length // 16) for length in CONTEXT_LENGTHS):
        with engine.server(model, max_model_len=length + steps + 64) as server:
            prompt = np.random.default_rng(bench.run).integers(10, 1000, length).tolist()
            prefill = _seconds(server, prompt, 1)
            _seconds(server, prompt, 1 + steps)  # warm-up: the first batch of a kind takes longer
            pairs = [(_seconds(server, prompt, 1), _seconds(server, prompt, 1 + steps)) for _ in range(3)]
        cached = statistics.median(one for one, _ in pairs)
        if length > 1000 and cached > prefill / 3:
            raise MeasurementError(f"{engine.name} did not find the prompt in its cache: {cached:.2f} s for one token.")
        milliseconds.append(statistics.median(many - one for one, many in pairs) * 1000 / steps)
    short, long = milliseconds
    return {"time per token at 1k, ms": short, "time per token at 32k, ms": long, "32k / 1k, ×": long / short}


def _seconds(server: Server, prompt: list[int], num_tokens: int) -> float:
    """Seconds until the whole answer has arrived."""
    started = time.perf_counter()
    usage = server.complete(num_tokens, prompt)["usage"]
    seconds = time.perf_counter() - started
    if (usage["prompt_tokens"], usage["completion_tokens"]) != (len(prompt), num_tokens):
        raise MeasurementError(f"{len(prompt)} + {num_tokens} tokens were asked for, and the server counted {usage}.")
    return seconds


def _random_load(
    engine: ServingEngine, bench: Bench, name: str, streams: int, num: int, input_len: int, output_len: int
) -> dict[str, Any]:
    model = bench.model(name)
    flags = ["--dataset-name", "random", "--random-input-len", str(input_len), "--random-output-len", str(output_len)]
    flags += ["--num-prompts", str(num), "--max-concurrency", str(streams), "--metric-percentiles", "99"]
    with engine.server(model) as server:
        server.complete(8)
        # Warm-up: a server's first batch of a size takes longer, and a client reads its first stream late.
        bench.client.load(server, model, [*flags, "--seed", str(1000 + bench.run)])
        return bench.client.load(server, model, [*flags, "--seed", str(bench.run)])


def few_bits(weights: str, bits: str) -> list[Row]:
    """The offline rows with quantized weights; the rows of batches also with a KV cache in 8 bits."""
    batch = {"output tok/s": at_least(1.5, "llama.cpp", "OpenVINO")}
    stream = {"output tok/s": at_least(1.2, "llama.cpp", "OpenVINO")}
    plain, small_cache = Setting(weights), Setting(weights, INT8)
    return [
        Row(name, title, offline(*sizes, setting), targets, False, setting)
        for name, title, sizes, targets, setting in (
            (f"offline-128-64-{weights}", f"offline, 32 requests 128/64, {bits}", (32, 128, 64), batch, plain),
            (f"offline-128-64-{weights}-kv8", "– the same, KV cache in 8 bits", (32, 128, 64), batch, small_cache),
            (f"offline-512-32-{weights}", f"– the same, 512/32, {bits}", (32, 512, 32), batch, plain),
            (f"offline-512-32-{weights}-kv8", "– the same, KV cache in 8 bits", (32, 512, 32), batch, small_cache),
            (f"stream-128-64-{weights}", f"one stream, 128/64, {bits}", (1, 128, 64), stream, plain),
        )
    ]


KV_BYTES = 2 * 28 * 8 * 128 * 2  # of one token of LARGE: keys and values, layers, heads, head size, bfloat16
WEIGHTS_BYTES = 946.5e6  # of LARGE; its embedding is also its output matrix, so a step reads all of it
BYTES_READ = [WEIGHTS_BYTES + KV_BYTES * (length + CONTEXT_STEPS / 2) for length in CONTEXT_LENGTHS]

ROWS = [
    Row(
        "offline-128-64",
        f"offline, {LARGE}, 32 requests 128/64",
        offline(32, 128, 64),
        {"output tok/s": at_least(2.3, "vLLM") + at_least(2.1, "llama.cpp")},
        served=False,
    ),
    Row(
        "offline-512-32",
        "– the same, 512/32",
        offline(32, 512, 32),
        {"output tok/s": at_least(2, "vLLM", "llama.cpp")},
        served=False,
    ),
    Row(
        "offline-16-256",
        "– the same, 16/256",
        offline(32, 16, 256),
        {"output tok/s": at_least(2, "vLLM", "llama.cpp")},
        served=False,
    ),
    Row(
        "stream-128-64",
        "one stream, 128/64",
        offline(1, 128, 64),
        {"output tok/s": at_least(1.2, "llama.cpp")},
        served=False,
    ),
    *few_bits(Q8_0, "8 bits"),
    *few_bits(Q4_0, "4 bits"),
    *few_bits(Q4_K_M, "4 bits (Q4_K_M)"),
    Row(
        "served-64",
        f"served, {SMALL}, 64 streams 64/64",
        served,
        {
            "output tok/s": at_least(3, "vLLM"),
            "median time to first token, ms": at_most(0.5, "vLLM"),
            "P99 inter-token latency, ms": at_most(0.5, "vLLM"),
        },
    ),
    Row(
        "served-1",
        f"served, {SMALL}, one stream 64/64",
        served_one,
        {
            "median time per output token, ms": at_most(0.4, "vLLM"),
            "median time of an answer by its tokens, ms": at_most(0.4, "vLLM"),
        },
    ),
    Row(
        "prefix",
        f"a cached 2,000-token prefix, {LARGE}, 32 requests",
        shared_prefix,
        {"time to last first token, ms": at_most(0.5, "vLLM")},
    ),
    Row("startup-tiny", f"start of a server, {SMALL}", startup(SMALL), {"to first answer, s": at_most(3)}),
    Row("startup-0.6b", f"start of a server, {LARGE}", startup(LARGE), {"to first answer, s": at_most(4)}),
    Row(
        "memory",
        f"resident memory of all processes, {LARGE}",
        memory,
        {"beyond weights and cache, GB": at_most(0.5)},
    ),
    Row(
        "context-32k",
        f"decode at 1k and 32k tokens of context, {LARGE}",
        long_context,
        {"32k / 1k, ×": at_most(round(BYTES_READ[1] / BYTES_READ[0], 2))},  # no worse than the bytes that a step reads
    ),
]
