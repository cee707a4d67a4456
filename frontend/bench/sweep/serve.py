"""`quire bench sweep serve`: starts a server for each server setting, and runs a load for each benchmark setting."""

import argparse
import shlex
from datetime import datetime
from functools import partial
from pathlib import Path

from quire.core.errors import ConfigError
from quire.frontend.bench.sweep.children import base_url, run_command, running_server, split_command
from quire.frontend.bench.sweep.experiment import Experiment, Point
from quire.frontend.bench.sweep.grid import Setting, read_settings
from quire.frontend.bench.sweep.plots import Axis, Plot, require_matplotlib
from quire.frontend.bench.sweep.report import add_report_arguments, show

OUTPUT = Axis("output_throughput", "output tok/s")
PLOTS = [
    Plot("throughput_vs_tpot", Axis("median_tpot_ms", "median time per output token, ms"), OUTPUT),
    Plot("throughput_vs_ttft", Axis("median_ttft_ms", "median time to first token, ms"), OUTPUT),
    Plot("throughput_vs_e2el", Axis("median_e2el_ms", "median request latency, ms"), OUTPUT),
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds vLLM's flags; the commands may be vLLM's, too."""
    group = parser.add_argument_group("sweep")
    group.add_argument("--serve-cmd", required=True, help='Starts the server: "quire serve MODEL --port 8000".')
    group.add_argument("--bench-cmd", required=True, help='Puts load on it: "quire bench serve --num-prompts 100".')
    group.add_argument("--after-bench-cmd", help="Runs after each benchmark, such as one that empties a cache.")
    group.add_argument("--serve-params", metavar="JSON", help="Flags of the server to try: a JSON file, or the JSON.")
    group.add_argument("--bench-params", metavar="JSON", help="Flags of the benchmark to try, for each server.")
    group.add_argument(
        "--server-ready-timeout", type=float, default=300, help="Seconds a server may take (default: %(default)s)."
    )
    add_report_arguments(group)


def run(args: argparse.Namespace) -> int:
    """Runs the sweep. Returns the exit code: 1 if a run failed."""
    sweep = ServeSweep(args)
    if args.dry_run:
        print("\n".join(sweep.commands()))
        return 0
    if not args.no_plots:
        require_matplotlib()
    return sweep.run()


class ServeSweep:
    """One sweep.

    Every run has its own seed, unless the command has one: otherwise the server would find an earlier run's prompts in
    its prefix cache.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        if args.num_runs < 1:
            raise ConfigError(f"--num-runs must be at least 1, got {args.num_runs}.")
        self._args = args
        self._serve = split_command("--serve-cmd", args.serve_cmd)
        self._bench = split_command("--bench-cmd", args.bench_cmd)
        self._after = split_command("--after-bench-cmd", args.after_bench_cmd) if args.after_bench_cmd else None
        self._serve_settings = read_settings("--serve-params", args.serve_params)
        self._bench_settings = read_settings("--bench-params", args.bench_params)
        self._num_started = 0

    @property
    def points(self) -> list[Point]:
        return [Point(serve, bench) for serve in self._serve_settings for bench in self._bench_settings]

    def commands(self) -> list[str]:
        """The commands of the sweep, in order."""
        lines = []
        for serve in self._serve_settings:
            lines.append(shlex.join(serve.apply(self._serve)))
            for bench in self._bench_settings:
                for _ in range(self._args.num_runs):
                    lines.append("  " + shlex.join(self._bench_command(serve, bench)))
                    if self._after:
                        lines.append("  " + shlex.join(self._after))
        return lines

    def run(self) -> int:
        args = self._args
        folder = Path(args.output_dir) / (args.experiment_name or f"{datetime.now():%Y%m%d-%H%M%S}")
        experiment = Experiment.open(folder, args.num_runs, resume=args.resume, go_on=args.continue_on_error)
        for serve in self._serve_settings:
            points = [Point(serve, bench) for bench in self._bench_settings]
            if any(experiment.missing(point) for point in points):
                with experiment.tolerating(f"the server {serve.name}"):
                    self._run_server(serve, points, experiment)
        show(args, folder, experiment.summarize(self.points), PLOTS)
        return 1 if experiment.errors else 0

    def _run_server(self, serve: Setting, points: list[Point], experiment: Experiment) -> None:
        args = self._args
        command = serve.apply(self._serve)
        print(shlex.join(command), flush=True)
        with running_server(command, ready_seconds=args.server_ready_timeout, show_output=args.show_stdout):
            for point in points:
                experiment.run(point, partial(self._measure, point))

    def _measure(self, point: Point, path: Path) -> None:
        """Runs one benchmark. The result is renamed when complete, so that a file at `path` is always complete."""
        unfinished = path.with_suffix(".partial")
        saving = ["--save-result", "--result-dir", str(path.parent), "--result-filename", unfinished.name]
        command = self._bench_command(point.serve, point.bench) + saving
        print("  " + shlex.join(command), flush=True)
        try:
            run_command(command, show_output=self._args.show_stdout)
        finally:
            if self._after:
                run_command(self._after, show_output=self._args.show_stdout)
        unfinished.rename(path)

    def _bench_command(self, serve: Setting, bench: Setting) -> list[str]:
        command = bench.apply(self._bench)
        if not any(word.startswith(("--base-url", "--port")) for word in command):
            command += ["--base-url", base_url(serve.apply(self._serve))]
        if not any(word.startswith("--seed") for word in command):
            command += ["--seed", str(self._num_started)]
        self._num_started += 1
        return command
