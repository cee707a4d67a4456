"""`quire check-cluster`: whether hosts can serve one model together. The same command runs on each of them."""

import argparse
import asyncio
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from msgspec import Struct
from msgspec.structs import fields, replace

from quire.core.config.engine_args import convert_group
from quire.core.config.load import LoadConfig
from quire.core.config.model import ModelConfig
from quire.core.config.parallel import ParallelConfig
from quire.frontend.cli.collect_env import read_cpu
from quire.frontend.cli.columns import columns
from quire.frontend.flags.parser import CommandParser

if TYPE_CHECKING:
    from quire.core.cluster.check import Findings
    from quire.core.cluster.check_messages import CheckStart, Quantity

PROBLEMS = 1
"""Exit code where the hosts cannot serve together."""
_MEBIBYTE, _GIBIBYTE = 1 << 20, 1 << 30
_GPU_QUERY = ["--query-gpu=name,memory.free", "--format=csv,noheader,nounits"]


def add_arguments(parser: CommandParser) -> None:
    parser.add_argument(
        "checkpoint", nargs="?", metavar="MODEL",
        help="Folder or hub id of the model; with it, the nodes compare their checkpoints.",
    )  # fmt: skip
    _add_some(parser, "parallel", ParallelConfig, {"nnodes", "node_rank", "master_addr", "master_port"})
    _add_some(parser, "source", ModelConfig, {"revision"})
    _add_some(parser, "load", LoadConfig, {"download_dir"})
    parser.common = list(parser.fields)
    group = parser.add_argument_group("check")
    group.add_argument(
        "--timeout", type=float, default=60.0, metavar="SECONDS",
        help="How long node 0 waits for the others, and these for node 0 (default: %(default)g).",
    )  # fmt: skip
    parser.common.append("--timeout")


def _add_some(parser: CommandParser, dest: str, struct: type[Struct], names: set[str]) -> None:
    """Flags of `quire serve` that say who takes part, and where the checkpoint is."""
    added = parser.add_struct(struct, without={field.name for field in fields(struct)} - names)
    parser.compose(dest, added, lambda given: convert_group(struct, given))


def run(args: argparse.Namespace) -> int:
    # Imported here, so that --help loads no sockets.
    from quire.core.logging import LoggingConfig, configure
    from quire.frontend.launch.nodes import check_start

    configure("check-cluster", LoggingConfig())
    model = replace(args.source, model=args.checkpoint)
    start = check_start(args.parallel, model, args.load, *_devices())
    problems = asyncio.run(_follow(start, args.timeout) if args.parallel.node_rank else _lead(start, args.timeout))
    print("\n".join(f"Problem: {problem}" for problem in problems) or "These nodes can serve together.")
    return PROBLEMS if problems else 0


async def _lead(start: "CheckStart", patience: float) -> list[str]:
    from quire.core.cluster.check import CheckHead

    head = CheckHead(start)
    try:
        findings = await head.run(patience)
    finally:
        head.close()
    print("\n".join(as_text(findings)), end="\n\n")
    return findings.problems


async def _follow(start: "CheckStart", patience: float) -> list[str]:
    from quire.core.cluster.check_node import CheckNode

    node = CheckNode(start)
    try:
        return await node.run(patience)
    finally:
        node.close()


def as_text(findings: "Findings") -> Iterator[str]:
    """The tables of what was found."""
    rows: list[tuple[str, ...]] = [
        ("node", "host", "address", "Quire", "torch", "checkpoint", "clock", "free memory", "devices")
    ]
    for rank, report in findings.reports.items():
        facts = report.facts
        apart = f"{findings.seconds_apart[rank]:+z.1f} s" if rank else "0"
        host = (facts.hostname, facts.address, facts.quire, facts.torch, facts.digest[:8] or "-")
        rows.append((str(rank), *host, apart, report.free_memory, report.devices))
    yield from columns(rows)
    yield from _matrix(findings, "latency", "Median round trip in ms, from the row's node to the column's", 1e3)
    yield from _matrix(findings, "bandwidth", "Bandwidth in MB/s, from the row's node to the column's", 1e-6)


def _matrix(findings: "Findings", quantity: "Quantity", title: str, factor: float) -> Iterator[str]:
    ranks, values = list(findings.reports), findings.links[quantity]
    yield f"\n{title}"
    rows = [("", *map(str, ranks))]
    for source in ranks:
        cells = (_figure(values.get((source, target)), factor) if source != target else "-" for target in ranks)
        rows.append((str(source), *cells))
    yield from columns(rows)


def _figure(value: float | None, factor: float) -> str:
    return "none" if value is None else f"{value * factor:.3g}" if value * factor < 100 else f"{value * factor:.0f}"


def _devices() -> tuple[str, str]:
    """What this host computes with, and its free memory: of its GPUs, or without any of the host."""
    if gpus := _gpus():
        return ", ".join(name for name, _ in gpus), ", ".join(f"{free / _GIBIBYTE:.1f} GiB" for _, free in gpus)
    processor, _ = read_cpu(Path("/proc/cpuinfo"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    free = psutil.virtual_memory().available
    return f"{cores} cores, {processor or platform.processor()}", f"{free / _GIBIBYTE:.1f} GiB"


def _gpus() -> list[tuple[str, int]]:
    """Name and free bytes of each GPU, as the driver's own program says."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    done = subprocess.run([program, *_GPU_QUERY], capture_output=True, text=True, timeout=30, check=False)
    rows = [line.rsplit(",", 1) for line in done.stdout.splitlines() if "," in line] if done.returncode == 0 else []
    return [(name.strip(), int(free) * _MEBIBYTE) for name, free in rows if free.strip().isdigit()]
