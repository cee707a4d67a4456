"""`scripts/compare_peers`: Quire, a peer, Quire, a peer ...; medians and their ratios, as Markdown and as JSON."""

import argparse
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from engines import Engine, LlamaCpp, Quire, Vllm
from processes import MeasurementError
from rows import ROWS, Bench, Figures, Row


def main() -> int:
    args = _parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # children have groups of their own: end them on the way
    work = Path(args.work or tempfile.mkdtemp(prefix="compare-peers-"))
    work.mkdir(parents=True, exist_ok=True)
    vllm = Vllm(args.vllm.absolute(), work, args.limit)
    engines: list[Engine] = [Quire(work, args.limit), vllm]
    if args.llama_cpp:
        engines.append(LlamaCpp(args.llama_cpp.absolute(), args.peers_scripts.absolute(), work, args.limit))
    bench = Bench(args.models.absolute(), vllm, args.smoke)
    results = []
    for row in (row for row in ROWS if not args.only or row.name in args.only):
        results.append(_measure(row, engines, bench, args.runs))
        if args.output_json:
            _write(args.output_json, results, args)
    print(f"\nLogs are in {work}.\n", file=sys.stderr)
    print(markdown(results))
    return 1 if any(result["errors"] for result in results) else 0


def _parse() -> argparse.Namespace:
    names = [row.name for row in ROWS]
    parser = argparse.ArgumentParser(prog="compare_peers", description=__doc__)
    parser.add_argument("--vllm", type=Path, required=True, help="Virtual environment of vLLM.")
    parser.add_argument("--llama-cpp", type=Path, help="Virtual environment of llama-cpp-python; offline rows only.")
    parser.add_argument("--peers-scripts", type=Path, help="Folder of to_gguf.py and llama_batched.py.")
    parser.add_argument("--models", type=Path, required=True, help="Folder of the benchmark checkpoints.")
    parser.add_argument("--runs", type=int, default=3, help="Runs of every engine (default: %(default)s).")
    parser.add_argument("--only", type=lambda text: text.split(","), help=f"Rows, by comma: {', '.join(names)}.")
    parser.add_argument("--limit", type=float, default=900, help="Seconds that one child may take.")
    parser.add_argument("--work", help="Folder of logs and converted weights; a new one when left out.")
    parser.add_argument("--output-json", type=Path, help="File for every figure of every run.")
    parser.add_argument("--smoke", action="store_true", help="Tiny sizes: see that everything runs.")
    args = parser.parse_args()
    if unknown := set(args.only or []) - set(names):
        parser.error(f"--only: no row {sorted(unknown)[0]!r}; there are {', '.join(names)}")
    if args.llama_cpp and not args.peers_scripts:
        parser.error("--llama-cpp needs --peers-scripts")
    return args


def _measure(row: Row, engines: list[Engine], bench: Bench, runs: int) -> dict[str, Any]:
    """All runs of one row, the engines taking turns. An engine that fails leaves the row to the others."""
    taking_part = [engine for engine in engines if not row.served or engine.serves]
    figures: dict[str, list[Figures]] = {engine.name: [] for engine in taking_part}
    errors: list[str] = []
    for run in range(runs):
        for engine in taking_part:
            try:
                figures[engine.name].append(row.measure(engine, replace(bench, run=run)))
                print(f"{row.name} {engine.name} {figures[engine.name][-1]}", file=sys.stderr, flush=True)
            except MeasurementError as error:
                errors.append(f"{engine.name}: {error}")
                print(f"{row.name} {errors[-1]}", file=sys.stderr, flush=True)
    return {"row": row.name, "title": row.title, "reach": row.reach, "runs": figures, "errors": errors}


def markdown(results: list[dict[str, Any]]) -> str:
    """A table: medians, and Quire's as multiples of each peer's."""
    lines = ["| workload | figure | Quire | vLLM | llama.cpp | Quire / vLLM | Quire / llama.cpp | reach |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for result in results:
        medians = {name: _medians(runs) for name, runs in result["runs"].items() if runs}
        for metric in dict.fromkeys(metric for figures in medians.values() for metric in figures):
            values = [medians.get(name, {}).get(metric) for name in ("Quire", "vLLM", "llama.cpp")]
            ratios = [values[0] / peer if peer and values[0] else None for peer in values[1:]]
            cells = [_cell(value) for value in values] + [f"{ratio:.2f} ×" if ratio else "" for ratio in ratios]
            lines.append(f"| {result['title']} | {metric} | {' | '.join(cells)} | {result['reach'].get(metric, '')} |")
    return "\n".join(lines)


def _medians(runs: list[Figures]) -> Figures:
    return {metric: statistics.median(run[metric] for run in runs) for metric in runs[0]}


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:,.2f}" if value < 100 else f"{value:,.0f}"


def _write(path: Path, results: list[dict[str, Any]], args: argparse.Namespace) -> None:
    machine = {"date": f"{date.today()}", "cores": os.cpu_count(), "machine": platform.machine(), "cpu": _cpu()}
    content = machine | {"smoke": args.smoke, "results": results}
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    sys.exit(main())
