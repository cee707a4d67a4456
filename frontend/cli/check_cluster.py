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

from quire.core.config.engine_args import EngineArgs
from quire.core.ram import available_ram
from quire.frontend.cli import serve
from quire.frontend.cli.collect_env import read_cpu
from quire.frontend.cli.columns import columns
from quire.frontend.flags.parser import CommandParser

if TYPE_CHECKING:
    from quire.core.cluster.check_coordinator import Findings
    from quire.core.cluster.check_messages import CheckStart, GPUMemory, NodeReport, Quantity
    from quire.frontend.launch.cluster_check import MemoryCheck

COMMON = [
    "--nnodes", "--node-rank", "--master-addr", "--master-port", "--tensor-parallel-size", "--pipeline-parallel-size",
    "--data-parallel-size", "--data-parallel-address", "--data-parallel-rpc-port", "--timeout",
]  # fmt: skip
PROBLEMS = 1
"""Exit code where the hosts cannot serve together."""
_MEBIBYTE, _GIBIBYTE = 1 << 20, 1 << 30
_GPU_QUERY = ["--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits"]


def add_arguments(parser: CommandParser) -> None:
    serve.add_arguments(parser)
    parser.common = COMMON
    group = parser.add_argument_group("check")
    group.add_argument(
        "--timeout", type=float, default=60.0, metavar="SECONDS",
        help="How long node 0 waits for the others, and these for node 0 (default: %(default)g).",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    # Imported here, so that --help loads no sockets.
    from quire.core.logging import configure
    from quire.frontend.launch.cluster_check import check_of

    engine_args: EngineArgs = args.engine_args
    configure("check-cluster", engine_args.observability.logging)
    start, memory = check_of(engine_args, *_devices())
    is_first = start.report.facts.ranks == [0]
    problems = asyncio.run(_lead(start, args.timeout, memory) if is_first else _follow(start, args.timeout))
    print("\n".join(f"Problem: {problem}" for problem in problems) or "These nodes can serve together.")
    return PROBLEMS if problems else 0


async def _lead(start: "CheckStart", patience: float, memory: "MemoryCheck | None") -> list[str]:
    from quire.core.cluster.check_coordinator import CheckCoordinator

    head = CheckCoordinator(start, None if memory is None else memory.misfits)
    try:
        findings = await head.run(patience)
    finally:
        head.close()
    print("\n".join(as_text(findings)), end="\n\n")
    return findings.problems


async def _follow(start: "CheckStart", patience: float) -> list[str]:
    from quire.core.cluster.check_participant import CheckParticipant

    node = CheckParticipant(start)
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
        torch, checkpoint = facts.packages.get("torch", "none"), facts.digest[:8] or "-"
        host = (facts.hostname, facts.address, facts.quire, torch, checkpoint)
        rows.append((str(rank), *host, apart, _free_memory(report), report.devices))
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


def _free_memory(report: "NodeReport") -> str:
    """The free memory of the GPUs, or of the host if it has none."""
    free = [gpu.free_bytes for gpu in report.gpus] or [report.ram_bytes]
    return ", ".join(f"{each / _GIBIBYTE:.1f} GiB" for each in free)


def _devices() -> tuple[str, int, list["GPUMemory"]]:
    """The name of this host's devices, its free RAM, and the memory of its GPUs."""
    ram = available_ram()
    if gpus := _gpus():
        return ", ".join(name for name, _ in gpus), ram, [memory for _, memory in gpus]
    processor, _ = read_cpu(Path("/proc/cpuinfo"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cores} cores, {processor or platform.processor()}", ram, []


def _gpus() -> list[tuple[str, "GPUMemory"]]:
    """Name and memory of each GPU, as the driver's own program says."""
    from quire.core.cluster.check_messages import GPUMemory  # as in `run`

    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    done = subprocess.run([program, *_GPU_QUERY], capture_output=True, text=True, timeout=30, check=False)
    rows = [line.rsplit(",", 2) for line in done.stdout.splitlines()] if done.returncode == 0 else []
    return [
        (name.strip(), GPUMemory(int(total) * _MEBIBYTE, int(free) * _MEBIBYTE))
        for name, total, free in (row for row in rows if len(row) == 3)
        if total.strip().isdigit() and free.strip().isdigit()
    ]
