"""The step-time budget: its arithmetic on a timeline made by hand, and the command on a real engine."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.core.config.engine_args import EngineArgs
from quire.core.errors import QuireError
from quire.frontend.bench.implementations import PairedTimes
from quire.frontend.bench.step_budget import Span, decode_budget, linear_names, read_timeline
from quire.frontend.checkpoint.model_spec import read_model_spec
from quire.frontend.cli.main import QUIRE
from tests.commands import quire

NAMES = {"linear 8x24": "linear: qkv", "linear 8x99": "linear: lm_head"}


def step(begin: float, scale: float = 1.0) -> list[Span]:
    """20 µs: 2 of inputs, 10 forward (3 of them a layer, 4 attention), 6 sample (2 the head), 1 reading, 1 else."""
    parts = [
        ("step", 0, 20), ("inputs", 0, 2), ("forward", 2, 12), ("linear 8x24", 3, 6), ("attention", 6, 10),
        ("sample", 12, 18), ("linear 8x99", 12, 14), ("draw", 14, 16), ("result", 18, 19),
    ]  # fmt: skip
    return [Span(name, begin + first * scale, begin + last * scale) for name, first, last in parts]


def test_a_step_is_split_into_parts_that_add_up() -> None:
    # One step of prefill, then seven of decode, every 25 µs; some requests have ended before the last two.
    worker = [span for index in range(8) for span in step(1000 + 25 * index, scale=1.1 if index == 0 else 1)]
    engine = [Span("update", 1000 + 25 * index + 21, 1000 + 25 * index + 24) for index in range(8)]
    engine += [Span("plan", 1000 + 25 * index + 5, 1000 + 25 * index + 6) for index in range(8)]
    budget = decode_budget({"worker 0": worker, "engine": engine}, 7, NAMES)
    assert (budget.num_steps, budget.period) == (4, 25)
    assert budget.worker == {
        "step: all else": 1, "inputs": 2, "forward: all else": 3, "linear: qkv": 3, "attention": 4, "sampling": 4,
        "linear: lm_head": 2, "read tokens": 1, "between steps": 5,
    }  # fmt: skip
    assert budget.engine == {"plan": 1, "send": 0, "update": 3, "emit": 0, "result": 1}


def test_a_batch_that_never_decodes_together_is_refused() -> None:
    worker = [span for index in range(8) for span in step(25.0 * index)]
    with pytest.raises(QuireError, match="--output-len"):
        decode_budget({"worker 0": worker, "engine": []}, 4, NAMES)


def test_the_command_measures_each_batch_size(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    out, folder = tmp_path / "budget.json", checkpoint("llama")
    done = quire(
        "bench", "step", "--model", str(folder), "--batch-sizes", "1", "3", "--input-len", "6", "--output-len", "64",
        "--output-json", str(out),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    budgets = json.loads(out.read_text())["budgets"]
    assert [budget["batch_size"] for budget in budgets] == [1, 3]
    layers = set(linear_names(read_model_spec(folder, EngineArgs.from_flat(model=str(folder)).model)).values())
    for budget in budgets:
        assert layers | {"attention", "rotate_and_store", "norms", "sampling"} <= set(budget["worker"])
        assert sum(budget["worker"].values()) == pytest.approx(budget["period"])
        assert min(budget["worker"].values()) >= 0
    assert "| attention" in done.stdout


def test_two_implementations_are_timed_in_turns(
    checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "turns.json"
    arguments = ["--batch-sizes", "2", "--input-len", "6", "--output-len", "5", "--num-turns", "2"]
    implementations = ["--model-impl", "quire", "--against", "transformers"]
    model = ["--model", str(checkpoint("llama")), "--output-json", str(out)]
    assert QUIRE.run("quire", ["bench", "step", *model, *arguments, *implementations]) == 0
    found = json.loads(out.read_text())
    assert found["implementations"] == ["quire", "transformers"]
    assert [(each["what"], len(each["seconds"])) for each in found["turns"]] == [
        ("a prompt of 6 tokens", 2), ("a step of 2", 2),
    ]  # fmt: skip
    assert "quire, ms" in capsys.readouterr().out


def test_the_median_of_the_turns_is_their_ratio() -> None:
    turns = PairedTimes("a step of 1", [(1.0, 2.0), (4.0, 4.0), (2.0, 6.0)])
    assert (turns.least, turns.ratio) == ((1.0, 2.0), 2.0)


def test_a_timeline_is_read_by_track_with_the_outer_span_first(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    events = [
        {"ph": "M", "tid": 1, "name": "thread_name", "args": {"name": "worker 0"}},
        {"ph": "X", "tid": 1, "name": "inner", "ts": 5, "dur": 1},
        {"ph": "X", "tid": 1, "name": "outer", "ts": 5, "dur": 3},
    ]
    path.write_text(json.dumps({"traceEvents": events}))
    assert read_timeline(path) == {"worker 0": [Span("outer", 5, 8), Span("inner", 5, 6)]}
