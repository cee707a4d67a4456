"""Computes the figures of vLLM's benchmarks from timings, and writes them as a table and as JSON."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from rich.table import Table

from quire.frontend.bench.tables import show

METRICS = {
    "ttft": "Time to first token",
    "tpot": "Time per output token (without the first)",
    "itl": "Inter-token latency",
    "e2el": "End-to-end latency",
}


class RequestTiming(Struct):
    """The timing of one request at its client, in seconds."""

    prompt_tokens: int
    output_tokens: int = 0
    ttft: float = 0.0
    latency: float = 0.0
    gaps: list[float] = []  # between events with tokens
    num_texts: int = 1  # whose vectors or ranks the request is for
    text: str = ""  # of a streamed answer
    error: str = ""

    @property
    def tpot(self) -> float:
        """Seconds per output token after the first."""
        return (self.latency - self.ttft) / (self.output_tokens - 1)


def summarize(timings: list[RequestTiming], duration: float, percentiles: list[float]) -> dict[str, Any]:
    """Throughput per second and latency statistics in milliseconds, under vLLM's JSON keys."""
    done = [timing for timing in timings if not timing.error]
    input_tokens = sum(timing.prompt_tokens for timing in done)
    output_tokens = sum(timing.output_tokens for timing in done)
    figures: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(timings) - len(done),
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(done) / duration,
        "output_throughput": output_tokens / duration,
        "total_token_throughput": (input_tokens + output_tokens) / duration,
    }
    samples = {
        "ttft": [timing.ttft for timing in done],
        "tpot": [timing.tpot for timing in done if timing.output_tokens > 1],
        "itl": [gap for timing in done for gap in timing.gaps],
        "e2el": [timing.latency for timing in done],
    }
    for name, seconds in samples.items():
        figures |= _statistics(name, seconds, percentiles)
    return figures


def summarize_vectors(timings: list[RequestTiming], duration: float, percentiles: list[float]) -> dict[str, Any]:
    """As `summarize`, for answers without tokens, which come whole."""
    done = [timing for timing in timings if not timing.error]
    num_texts, input_tokens = sum(timing.num_texts for timing in done), sum(timing.prompt_tokens for timing in done)
    return {
        "duration": duration,
        "completed": len(done),
        "failed": len(timings) - len(done),
        "total_input_tokens": input_tokens,
        "total_input_sequences": num_texts,
        "request_throughput": len(done) / duration,
        "input_sequence_throughput": num_texts / duration,
        "total_token_throughput": input_tokens / duration,
        **_statistics("e2el", [timing.latency for timing in done], percentiles),
    }


def _statistics(name: str, seconds: list[float], percentiles: list[float]) -> dict[str, float]:
    values = np.asarray(seconds or [0.0]) * 1000
    figures = {
        f"mean_{name}_ms": float(values.mean()),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(values.std()),
    }
    return figures | {f"p{p:g}_{name}_ms": float(np.percentile(values, p)) for p in percentiles}


def print_table(title: str, rows: list[tuple[str, str]]) -> None:
    """Prints a table of two columns, the second right-aligned."""
    table = Table(title=title, show_header=False, min_width=len(title))
    table.add_column("figure")
    table.add_column("value", justify="right")
    for row in rows:
        table.add_row(*row)
    show(table)


def serve_rows(figures: dict[str, Any], metrics: list[str], percentiles: list[float]) -> list[tuple[str, str]]:
    """The rows of `bench serve`'s table; `metrics` are some of ttft, tpot, itl, e2el."""
    rows = [
        ("Successful requests", str(figures["completed"])),
        ("Failed requests", str(figures["failed"])),
        ("Duration (s)", f"{figures['duration']:.2f}"),
        ("Input tokens", str(figures["total_input_tokens"])),
        *_middle_rows(figures)[:1],
        ("Requests per second", f"{figures['request_throughput']:.2f}"),
        *_middle_rows(figures)[1:],
        ("Total tokens per second", f"{figures['total_token_throughput']:.2f}"),
    ]
    if "request_goodput" in figures:
        rows.append(("Requests per second that met the objectives", f"{figures['request_goodput']:.2f}"))
    for name in metrics:
        rows.append((f"{METRICS[name]}: mean (ms)", f"{figures[f'mean_{name}_ms']:.2f}"))
        rows.append((f"{METRICS[name]}: median (ms)", f"{figures[f'median_{name}_ms']:.2f}"))
        for p in percentiles:
            rows.append((f"{METRICS[name]}: P{p:g} (ms)", f"{figures[f'p{p:g}_{name}_ms']:.2f}"))
    return rows


def _middle_rows(figures: dict[str, Any]) -> list[tuple[str, str]]:
    """The rows of outputs, and of outputs per second: tokens, or texts with vectors or ranks."""
    if "total_output_tokens" in figures:
        count, rate, what = "total_output_tokens", "output_throughput", "Output tokens"
    else:
        count, rate, what = "total_input_sequences", "input_sequence_throughput", "Texts"
    return [(what, str(figures[count])), (f"{what} per second", f"{figures[rate]:.2f}")]


def write_json(path: str | None, figures: dict[str, Any]) -> None:
    """Writes the figures to `path` (`--output-json`), unless it is None."""
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=2) + b"\n")
