"""Computes the time of each part of a decode step, in microseconds, from a recorded timeline."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from quire.core.config.resolved import ModelSpec
from quire.core.errors import QuireError

ROWS = {
    "step": "step: all else",
    "forward": "forward: all else",
    "sample": "sampling",
    "result": "read tokens",
    "attention_batch": "attention: prepare",
    "rms_norm": "norms",
    "add_rms_norm": "norms",
    "activate_and_mul": "activation",
}
"""Rows of spans; a span that is not listed has a row of its own name."""

ENGINE = ("plan", "send", "update", "emit")


class Span(NamedTuple):
    """A span of the timeline, in microseconds of one clock."""

    name: str
    begin: float
    end: float

    @property
    def duration(self) -> float:
        return self.end - self.begin


class Budget(NamedTuple):
    """Means over the steps in which every request decodes.

    Attributes:
        num_steps: the number of these steps.
        period: microseconds from the begin of a step to the begin of the next.
        worker: the parts of `period`, in order of execution; their sum is `period`.
        engine: the engine's work at the same time, and `result`: from the end of a step until the engine takes its
            result.
    """

    num_steps: int
    period: float
    worker: dict[str, float]
    engine: dict[str, float]


def read_timeline(path: Path) -> dict[str, list[Span]]:
    """A Chrome trace's spans by track, sorted by begin; of two that begin together, the longer is first."""
    events = msgspec.json.decode(path.read_bytes())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    tracks: dict[str, list[Span]] = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            begin, end = event["ts"], event["ts"] + event["dur"]
            # Rounded to nanoseconds, so that a span does not overlap the next one by a rounding error.
            tracks[names[event["tid"]]].append(Span(event["name"], round(begin, 3), round(end, 3)))
    for spans in tracks.values():
        spans.sort(key=lambda span: (span.begin, -span.end))
    return tracks


def linear_names(spec: ModelSpec) -> dict[str, str]:
    """Names of linear layers by the names of their spans, for one rank of a Llama-like decoder.

    Layers of equal sizes have the same span name, so they share a row.
    """
    hidden, inner = spec.hidden_size, spec.hf_config.get("intermediate_size", 0)
    query = spec.num_attention_heads * spec.head_dim
    sizes = {
        "qkv": (hidden, query + 2 * spec.num_kv_heads * spec.head_dim),
        "o": (query, hidden),
        "gate_up": (hidden, 2 * inner),
        "down": (inner, hidden),
        "lm_head": (hidden, spec.vocab_size),
    }
    names: dict[str, str] = {}
    for name, (num_inputs, num_outputs) in sizes.items():
        label = f"linear {num_inputs}x{num_outputs}"
        names[label] = f"{names[label]}, {name}" if label in names else f"linear: {name}"
    return names


def decode_budget(tracks: Mapping[str, list[Span]], output_len: int, names: Mapping[str, str]) -> Budget:
    """The budget of a recording of one batch, from its first step to its last.

    With T steps for `output_len` tokens of each request, the last prompt is done in step T - output_len + 1, and the
    first request ends in step `output_len`. In the steps between, every request decodes.

    Args:
        names: see `linear_names`.

    Raises:
        QuireError: there is no step in which every request decodes.
    """
    worker = tracks["worker 0"]
    steps = [span for span in worker if span.name == "step"]
    last_prefill = len(steps) - output_len + 1
    chosen = range(last_prefill, min(output_len, len(steps)) - 1)  # a period ends with the begin of the next step
    if len(chosen) < 2:
        raise QuireError(
            f"{len(steps)} steps for outputs of {output_len} tokens leave none in which all requests decode; "
            "raise --output-len or --max-num-batched-tokens."
        )
    updates = [span for span in tracks["engine"] if span.name == "update"]
    begin, end = steps[chosen[0]].begin, steps[chosen[-1] + 1].begin
    window = [span for span in worker if begin <= span.begin < end]
    period = (end - begin) / len(chosen)
    parts = {name: total / len(chosen) for name, total in _parts(window, names).items()}
    parts["between steps"] = period - sum(parts.values())
    engine = {
        name: sum(span.duration for span in tracks["engine"] if span.name == name and begin <= span.begin < end)
        / len(chosen)
        for name in ENGINE
    }
    engine["result"] = sum(updates[index].begin - steps[index].end for index in chosen) / len(chosen)
    return Budget(len(chosen), period, parts, engine)


def _parts(spans: Iterable[Span], names: Mapping[str, str]) -> dict[str, float]:
    """Total microseconds by row. A nested span is not counted in the span around it."""
    parts: dict[str, float] = {}
    around: list[tuple[Span, str]] = []  # the spans around the current one, and their rows; the innermost is last
    for span in spans:
        while around and around[-1][0].end <= span.begin:
            around.pop()
        outer = around[-1][1] if around else None
        row = _row(span.name, outer, names)
        parts[row] = parts.get(row, 0.0) + span.duration
        if outer is not None:
            parts[outer] -= span.duration
        around.append((span, row))
    return parts


def _row(name: str, outer: str | None, names: Mapping[str, str]) -> str:
    if name in names:
        return names[name]
    if outer == ROWS["sample"]:
        return outer  # an operation of the sampler
    return ROWS.get(name, name)


def table_rows(budgets: Mapping[int, Budget]) -> list[tuple[str, dict[int, float]]]:
    """Pairs of row and microseconds by batch size, the worker's parts first. A missing row of a batch is 0."""
    rows: dict[str, dict[int, float]] = {}
    for size, budget in budgets.items():
        for name, value in budget.worker.items():
            rows.setdefault(name, {})[size] = value
    for size, budget in budgets.items():
        rows.setdefault("one step", {})[size] = budget.period
    for size, budget in budgets.items():
        for name, value in budget.engine.items():
            rows.setdefault(f"engine: {name}", {})[size] = value
    return [(name, {size: values.get(size, 0.0) for size in budgets}) for name, values in rows.items()]


def as_json(budgets: Mapping[int, Budget]) -> list[dict[str, Any]]:
    """The budgets as JSON, one entry for each batch size."""
    return [{"batch_size": size} | budget._asdict() for size, budget in budgets.items()]
