"""`scripts/compare_peers`: measures Quire and its peers in turn; medians and ratios as Markdown, figures as JSON."""

import argparse
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from engines import Engine, GgufFiles, Quire, Vllm, gguf_engines
from processes import MeasurementError
from report import markdown
from results import Results, ResultsError
from rows import ROWS, Bench, Row


def main() -> int:
    args = _parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # exit runs the code that ends children in their own groups
    try:
        results = Results(args.output_json, smoke=args.smoke, resume=args.resume)
    except ResultsError as error:
        print(f"compare_peers: {error}", file=sys.stderr)
        return 2
    work = Path(args.work or tempfile.mkdtemp(prefix="compare-peers-"))
    work.mkdir(parents=True, exist_ok=True)
    vllm = Vllm((args.vllm or Path()).absolute(), work, args.limit)
    scripts, peers = (args.peers_scripts.absolute(), args.peers.absolute()) if args.peers else (Path(), Path())
    files = GgufFiles(scripts / "to_gguf.py", work, args.limit, peers) if args.peers else None
    engines: list[Engine] = [Quire(work, args.limit, files=files)]
    if args.before:
        python = args.before.absolute() / "bin" / "python"
        engines.append(Quire(work, args.limit, name="Quire before", python=python, files=files))
    if args.vllm and not args.without_vllm:
        engines.append(vllm)
    if files:
        engines += gguf_engines(peers, scripts, files, args.limit)
    bench = Bench(args.models.absolute(), vllm, args.smoke)
    for row in _chosen(args):
        measure(row, engines, bench, args.runs, results)
    print(f"\nLogs are in {work}.\n", file=sys.stderr)
    if args.smoke:
        print("Tiny sizes, and not the same model for all: these figures only show that everything runs.\n")
    print(markdown(ROWS, results.rows))
    return 1 if results.errors else 0


def _parse() -> argparse.Namespace:
    names = [row.name for row in ROWS]
    parser = argparse.ArgumentParser(prog="compare_peers", description=__doc__)
    parser.add_argument("--vllm", type=Path, help="Virtual environment of vLLM, whose client loads servers.")
    parser.add_argument("--without-vllm", action="store_true", help="Use vLLM's client alone, and measure no vLLM.")
    parser.add_argument("--before", type=Path, help="Virtual environment of another Quire, to be measured as a peer.")
    parser.add_argument(
        "--peers", type=Path, help="Folder of the environments `llama` and `openvino`, or of one of them; offline rows."
    )
    parser.add_argument("--peers-scripts", type=Path, help="Folder of to_gguf.py and these engines' scripts.")
    parser.add_argument("--models", type=Path, required=True, help="Folder of the benchmark checkpoints.")
    parser.add_argument("--runs", type=int, default=3, help="Runs of every engine (default: %(default)s).")
    parser.add_argument("--only", type=lambda text: text.split(","), help=f"Rows, by comma: {', '.join(names)}.")
    parser.add_argument("--limit", type=float, default=900, help="Seconds that one child or answer may take.")
    parser.add_argument("--work", help="Folder of logs and converted weights (default: a new one).")
    parser.add_argument("--output-json", type=Path, help="File for every figure, written after each run.")
    parser.add_argument("--resume", action="store_true", help="Go on with --output-json: run what it lacks.")
    parser.add_argument("--smoke", action="store_true", help="Tiny sizes: see that everything runs.")
    args = parser.parse_args()
    if unknown := set(args.only or []) - set(names):
        parser.error(f"--only: no row {sorted(unknown)[0]!r}; there are {', '.join(names)}")
    if args.peers and not args.peers_scripts:
        parser.error("--peers needs --peers-scripts")
    if not args.vllm and (served := [row.name for row in _chosen(args) if row.served]):
        parser.error(f"{served[0]} needs --vllm; --only names rows that do not")
    if args.resume and not args.output_json:
        parser.error("--resume needs --output-json")
    return args


def _chosen(args: argparse.Namespace) -> list[Row]:
    return [row for row in ROWS if not args.only or row.name in args.only]


def measure(row: Row, engines: list[Engine], bench: Bench, runs: int, results: Results) -> None:
    """Measures the runs of one row that `results` lacks, with the engines in turn.

    If one engine fails, the others go on.
    """
    taking_part = [each for each in engines if row.setting in each.settings and (each.serves or not row.served)]
    done = results.begin(row.name, row.title, [engine.name for engine in taking_part])
    for run in range(runs):
        for engine in taking_part:
            if len(done[engine.name]) > run:
                continue
            try:
                results.add(row.name, engine.name, row.measure(engine, replace(bench, run=run)))
                print(f"{row.name} {engine.name} {done[engine.name][-1]}", file=sys.stderr, flush=True)
            except MeasurementError as error:
                results.add_error(row.name, f"{engine.name}: {error}")
                print(f"{row.name} {engine.name}: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
