"""`quire bench sweep throughput`: measures offline throughput for each setting of the engine or the requests."""

import argparse
import shlex
from datetime import datetime
from functools import partial
from pathlib import Path

from quire.core.errors import ConfigError
from quire.frontend.bench.sweep.children import run_command, split_command
from quire.frontend.bench.sweep.experiment import Experiment, Point
from quire.frontend.bench.sweep.grid import Setting, read_settings
from quire.frontend.bench.sweep.plots import Axis, Plot, require_matplotlib
from quire.frontend.bench.sweep.report import add_report_arguments, show

PLOTS = [
    Plot("throughput", None, Axis("output_tokens_per_second", "output tok/s")),
    Plot(
        "throughput_vs_duration",
        Axis("elapsed_time", "seconds for all requests"),
        Axis("output_tokens_per_second", "output tok/s"),
    ),
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `sweep serve` that do not concern a server."""
    group = parser.add_argument_group("sweep")
    group.add_argument(
        "--bench-cmd", default="quire bench throughput", help="The benchmark (default: %(default)s), with its flags."
    )
    group.add_argument("--bench-params", metavar="JSON", help="Flags of it to try: a JSON file, or the JSON itself.")
    add_report_arguments(group)


def run(args: argparse.Namespace) -> int:
    """Runs the sweep. Returns the exit code: 1 if a run failed."""
    if args.num_runs < 1:
        raise ConfigError(f"--num-runs must be at least 1, got {args.num_runs}.")
    command = split_command("--bench-cmd", args.bench_cmd)
    points = [Point(Setting(""), bench) for bench in read_settings("--bench-params", args.bench_params)]
    if args.dry_run:
        for point in points:
            print("\n".join([shlex.join(point.bench.apply(command))] * args.num_runs))
        return 0
    if not args.no_plots:
        require_matplotlib()
    folder = Path(args.output_dir) / (args.experiment_name or f"{datetime.now():%Y%m%d-%H%M%S}")
    experiment = Experiment.open(folder, args.num_runs, resume=args.resume, go_on=args.continue_on_error)

    def measure(point: Point, path: Path) -> None:
        """Runs one benchmark. The result is renamed when complete, so that a file at `path` is always complete."""
        unfinished = path.with_suffix(".partial")
        line = [*point.bench.apply(command), "--output-json", str(unfinished)]
        print(shlex.join(line), flush=True)
        run_command(line, show_output=args.show_stdout)
        unfinished.rename(path)

    for point in points:
        experiment.run(point, partial(measure, point))
    show(args, folder, experiment.summarize(points), PLOTS)
    return 1 if experiment.errors else 0
