"""Runs the parts of a check of an accelerator, each in a process of its own with a time limit, within one budget."""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from part_results import Results, write_report

PYTHON = sys.executable


class Part(NamedTuple):
    """One part of the check.

    Attributes:
        seconds: its time limit; less where less of the budget is left.
        command: what follows `python`.
    """

    name: str
    seconds: int
    command: list[str]


TESTS = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-rfE", "--tb=short", "--timeout=120"]

COMPILED_ELSEWHERE = [
    f"--ignore=tests/ops/triton/test_{name}.py" for name in ("build", "canary", "gate", "kernel_report")
]
"""Tests that need no accelerator, and long."""

PARTS = [
    Part("ceilings", 60, ["scripts/gpu/ceilings.py"]),
    Part("small", 90, ["scripts/gpu/engine.py", "qwen3-0.6b", "--requests", "1", "32", "256", "--profile"]),
    Part("kernels", 60, ["scripts/gpu/kernels.py"]),
    Part("random", 60, ["scripts/gpu/engine.py", "qwen3-0.6b", "--requests", "1", "256", "--temperature", "1"]),
    Part("engine_tests", 75, [*TESTS, "-n", "8", "tests/gpu"]),
    Part("large", 90, ["scripts/gpu/engine.py", "qwen3-8b", "--requests", "1", "64", "256", "--input-len", "1024"]),
    Part("kernel_tests", 110, [*TESTS, "-n", "14", *COMPILED_ELSEWHERE, "tests/ops/triton"]),
    Part(
        "first_start",
        90,
        ["scripts/gpu/engine.py", "qwen3-0.6b", "--requests", "1"],
    ),
    Part(
        "second_start",
        60,
        ["scripts/gpu/engine.py", "qwen3-0.6b", "--requests", "1"],
    ),
    Part("families", 300, [*TESTS, "-n", "12", "tests/executor/models"]),
    Part("formats", 200, [*TESTS, "-n", "12", "tests/executor/weights/test_quantized_checkpoints.py"]),
    Part("sanitizer", 250, ["scripts/gpu/sanitizer.py"]),
]


def main() -> None:
    """Runs the parts of the command line, or all, in order of their value."""
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=int, default=540, help="Seconds for all parts (default: %(default)s).")
    parser.add_argument("--out", type=Path, default=Path("gpu_results"), help="Folder of the results.")
    parser.add_argument("--parts", nargs="+", choices=names, default=names, help="Parts to run (default: all).")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    results = Results(args.out / "results.jsonl")
    end = time.monotonic() + args.budget
    for part in PARTS:
        if part.name in args.parts:
            _run(part, args.out, results, end - time.monotonic())
            write_report(results.path, args.out / "report.md")
    print((args.out / "report.md").read_text())


def _run(part: Part, out: Path, results: Results, left: float) -> None:
    """Runs one part, whose output goes to a file of its name; its last lines are shown if it fails."""
    began = time.monotonic()
    log = out / f"{part.name}.log"
    seconds = min(part.seconds, left)
    if seconds < 10:
        results.add(part=part.name, outcome="no time left")
        return
    environment = os.environ | {"GPU_RESULTS": str(results.path.resolve()), "QUIRE_TEST_DEVICE": "cuda"}
    if not part.name.endswith("_start"):  # the kernels' own check would run beside what is measured
        environment["QUIRE_TRITON_CANARY"] = "0"
    with log.open("w") as output:
        process = subprocess.Popen(
            [PYTHON, *part.command], stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            outcome = "done" if process.wait(seconds) == 0 else f"exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            outcome = f"stopped after {seconds:.0f} s"
    lines = log.read_text(errors="replace").splitlines()
    print(f"== {part.name}: {outcome}, {time.monotonic() - began:.0f} s", flush=True)
    print("\n".join(lines[-(3 if outcome == "done" else 25) :]), flush=True)
    results.add(part=part.name, outcome=outcome, seconds=round(time.monotonic() - began, 1), last=lines[-1:])


if __name__ == "__main__":
    main()
