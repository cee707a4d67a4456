"""The command: measures each stage with each executor and number of streams, then the scheduler alone."""

import argparse
from typing import Any

import uvloop
from rich import box
from rich.table import Table

from quire.core.engine.gc_tuning import tune_garbage_collector
from quire.core.errors import ConfigError
from quire.frontend.bench.descriptors import make_room
from quire.frontend.bench.figures import write_json
from quire.frontend.bench.host.null_engine import NullSetup
from quire.frontend.bench.host.paths import PATHS
from quire.frontend.bench.host.steps import measure_steps
from quire.frontend.bench.host.streams import Workload, measure
from quire.frontend.bench.tables import show

ROLES = ("client", "frontend", "engine", "worker")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's flags; vLLM has no such benchmark."""
    group = parser.add_argument_group("host")
    group.add_argument("--model", help="Model for configuration and tokenizer (default: the demo model).")
    group.add_argument(
        "--num-streams",
        type=int,
        nargs="+",
        default=[1, 64, 512, 2048],
        help="Requests in flight; one run for each number.",
    )
    group.add_argument(
        "--stages",
        nargs="+",
        choices=[*PATHS, "steps"],
        default=[*PATHS, "steps"],
        help="engine: ids through ZeroMQ and workers; text: AsyncLLM; http: the server; steps: the scheduler alone.",
    )
    group.add_argument(
        "--executors", nargs="+", choices=["uni", "mp"], default=["uni", "mp"], help="Worker in a thread, or processes."
    )
    group.add_argument("--input-len", type=int, default=32, help="Prompt tokens (default: %(default)s).")
    group.add_argument("--output-len", type=int, default=64, help="Output tokens (default: %(default)s).")
    group.add_argument(
        "--seconds", type=float, default=3.0, help="Seconds for which streams send requests (default: %(default)s)."
    )
    group.add_argument("--num-steps", type=int, default=100, help="Steps timed for `steps` (default: %(default)s).")
    group.add_argument("--output-json", help="File for the figures.")


def run(args: argparse.Namespace) -> int:
    """Measures. Returns the exit code."""
    for name in ("input_len", "output_len", "num_steps"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}.")
    if min(args.num_streams) < 1:
        raise ConfigError(f"--num-streams must be at least 1, got {min(args.num_streams)}.")
    if "http" in args.stages:
        make_room(max(args.num_streams), "--num-streams")
    streams: list[dict[str, Any]] = []
    for executor in args.executors:
        for stage in (name for name in args.stages if name in PATHS):
            for num_streams in args.num_streams:
                figures = uvloop.run(_measure_stage(args, executor, stage, num_streams))
                streams.append({"executor": executor, "stage": stage} | figures)
    if streams:
        show(_stream_table(streams))
    steps = []
    if "steps" in args.stages:
        config, _ = _setup(args, "uni", max(args.num_streams)).resolve()
        tune_garbage_collector()  # as in an engine: the default, a collection per 700 objects, grows with the requests
        steps = [measure_steps(config, num_running, args.num_steps) for num_running in args.num_streams]
        show(_step_table(steps))
    write_json(args.output_json, {"streams": streams, "steps": steps})
    return 0


def _setup(args: argparse.Namespace, executor: str, num_streams: int) -> NullSetup:
    return NullSetup(executor, num_streams, args.input_len + args.output_len, args.model)


async def _measure_stage(args: argparse.Namespace, executor: str, name: str, num_streams: int) -> dict[str, Any]:
    """Measures one stage with fresh processes, so that measurements do not affect each other."""
    setup = _setup(args, executor, num_streams)
    config, _ = setup.resolve()
    workload = Workload(args.input_len, args.output_len, args.seconds, config.spec.vocab_size)
    stage = PATHS[name](setup)
    try:
        await stage.start()
        return await measure(stage, num_streams, workload)
    finally:
        await stage.close()


def _stream_table(rows: list[dict[str, Any]]) -> Table:
    title = "Host overhead with a worker that answers at once; CPU in µs per token"
    table = Table(title=title, box=box.SIMPLE, padding=0)  # narrow, because ten columns must fit a terminal
    for column in ("executor", "stage", "streams", "req/s", "tok/s", "µs/tok", *ROLES):
        table.add_column(column, justify="left" if column in ("executor", "stage") else "right", no_wrap=True)
    for row in rows:
        cpu = [f"{row['cpu_us_per_token'][role]:.1f}" if role in row["cpu_us_per_token"] else "" for role in ROLES]
        table.add_row(
            row["executor"],
            row["stage"],
            f"{row['streams']:,}",
            f"{row['requests_per_second']:,.0f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['wall_us_per_token']:.1f}",
            *cpu,
        )
    return table


def _step_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="Scheduler: µs of one decode step")
    for column in ("running", "schedule", "update", "schedule + update", "per request", "encode messages"):
        table.add_column(column, justify="right")
    for row in rows:
        figures = [row[key] for key in ("schedule_us", "update_us", "step_us", "us_per_request", "encode_us")]
        table.add_row(f"{row['running']:,}", *(f"{figure:,.2f}" for figure in figures))
    return table
