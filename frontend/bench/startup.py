"""`quire bench startup`: seconds from `quire serve` to a healthy server and its first answer; its memory then."""

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, NamedTuple

import httpx
import msgspec
import numpy as np

from quire.core.config.engine_args import EngineArgs
from quire.core.errors import QuireError
from quire.frontend.bench.figures import print_table, write_json
from quire.frontend.bench.memory import ResidentMemory, checkpoint_bytes, processor_seconds, resident_memory
from quire.frontend.checkpoint.model_source import find_model
from quire.frontend.flags.parser import CommandParser, add_engine_options
from quire.frontend.flags.ranges import COUNT_OR_NONE
from quire.frontend.launch import device
from quire.frontend.launch.inspection import plan_load

PATIENCE_SECONDS = 600.0
POLL_SECONDS = 0.005
MB = 1e6


class Start(NamedTuple):
    """One start of a server.

    Attributes:
        healthy: seconds until /health answers 200.
        answered: seconds until one token was generated.
        processor: seconds of processor time that all its processes took until then.
        memory: resident memory of all its processes after that.
    """

    healthy: float
    answered: float
    processor: float
    memory: ResidentMemory


def add_arguments(parser: CommandParser) -> None:
    """Adds vLLM's flags, and all engine options."""
    add_engine_options(parser)
    group = parser.add_argument_group("startup")
    group.add_argument(
        "--num-iters-cold",
        type=COUNT_OR_NONE,
        default=3,
        help="Starts with the checkpoint dropped from the page cache.",
    )
    group.add_argument(
        "--num-iters-warmup", type=COUNT_OR_NONE, default=1, help="Starts before the warm ones, not measured."
    )
    group.add_argument(
        "--num-iters-warm", type=COUNT_OR_NONE, default=3, help="Starts with everything in the page cache."
    )
    group.add_argument("--output-json", help="File for the figures.")


def run(args: argparse.Namespace) -> int:
    """Starts and stops servers. Returns the exit code."""
    folder = find_model(args.engine_args.model, args.engine_args.load)
    options = _flags_of(args.engine_args.flat())
    cold = []
    for _ in range(args.num_iters_cold):
        _drop_from_page_cache(folder)
        cold.append(_start_once(options))
    for _ in range(args.num_iters_warmup):
        _start_once(options)
    warm = [_start_once(options) for _ in range(args.num_iters_warm)]
    medians = _seconds("cold", cold) | _seconds("warm", warm)
    rows = [(name.replace("_", " "), f"{value:.2f}") for name, value in medians.items()]
    figures: dict[str, object] = {**medians}
    if starts := cold + warm:
        held = _megabytes([start.memory for start in starts], _weights_bytes(args.engine_args, folder))
        figures |= held
        rows += [(name.replace("_", " "), f"{value:,.0f}") for name, value in held.items()]
    print_table("Start-up (median)", rows)
    seconds = {"cold_starts": [start[:3] for start in cold], "warm_starts": [start[:3] for start in warm]}
    write_json(args.output_json, figures | seconds)
    return 0


def _seconds(kind: str, starts: list[Start]) -> dict[str, float]:
    if not starts:
        return {}
    healthy, answered, processor = (float(np.median([start[index] for start in starts])) for index in range(3))
    return {
        f"{kind}_healthy_seconds": healthy,
        f"{kind}_first_answer_seconds": answered,
        f"{kind}_processor_seconds": processor,
    }


def _megabytes(memories: list[ResidentMemory], weights_bytes: int | None) -> dict[str, float]:
    """Medians in megabytes. If `weights_bytes` is None (unknown), the memory beyond the weights is left out."""
    figures = {
        "resident_mb": float(np.median([memory.total for memory in memories])) / MB,
        "resident_cache_mb": float(np.median([memory.cache for memory in memories])) / MB,
    }
    if weights_bytes is not None:
        beyond = np.median([memory.beyond(memory.mapped or weights_bytes) for memory in memories])
        figures["resident_beyond_weights_and_cache_mb"] = float(beyond) / MB
    return figures


def _weights_bytes(args: EngineArgs, folder: Path) -> int | None:
    """Bytes of the host's memory that the weights take; None if unknown."""
    if device.choose(args.device.device) != "cpu":
        return 0
    if args.model.quantization is not None or args.model.quantization_config is not None:
        return sum(rank.weights_bytes for rank in plan_load(args)[1].ranks)
    return checkpoint_bytes(folder) or None


def _flags_of(options: dict) -> list[str]:
    """Engine options as flags; options that are None or empty are left out."""
    flags = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is None or value in ([], {}):
            continue
        match value:
            case bool():
                flags.append(flag if value else "--no-" + flag[2:])
            case list():
                flags += [flag, *value]
            case dict() | msgspec.Struct():
                flags += [flag, msgspec.json.encode(value).decode()]
            case _:
                flags += [flag, str(value)]
    return flags


def _drop_from_page_cache(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def _start_once(options: list[str]) -> Start:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "quire", "serve", *options, "--host", "127.0.0.1", "--port", str(port)]
    base_url = f"http://127.0.0.1:{port}"
    started = time.perf_counter()
    with tempfile.TemporaryFile("w+") as log:  # no pipe, which a log of each look at the health would fill
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
        try:
            with httpx.Client(base_url=base_url, timeout=PATIENCE_SECONDS) as client:
                _wait_until_healthy(client, process, log, started)
                healthy = time.perf_counter() - started
                model = client.get("/v1/models").json()["data"][0]["id"]
                body = {"model": model, "prompt": [1], "max_tokens": 1, "ignore_eos": True}
                client.post("/v1/completions", json=body).raise_for_status()
                answered = time.perf_counter() - started
                return Start(healthy, answered, processor_seconds(process.pid), resident_memory(process.pid))
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def _wait_until_healthy(client: httpx.Client, process: subprocess.Popen, log: IO[str], started: float) -> None:
    while time.perf_counter() - started < PATIENCE_SECONDS:
        if process.poll() is not None:
            log.seek(0)
            raise QuireError(f"the server ended while it started: {log.read()}")
        with contextlib.suppress(httpx.HTTPError):
            if client.get("/health").status_code == 200:
                return
        time.sleep(POLL_SECONDS)
    raise QuireError(f"the server was not healthy after {PATIENCE_SECONDS:.0f} s")
