"""Longest pauses of streams around one kill or stop, on a machine with nothing beside."""

import argparse
import asyncio
import itertools
import os
import signal
import statistics
import time

import httpx
import psutil
from server import Server, ServerError

NAME = "pauses"
SUMMARY = "How long streams wait when an engine or a worker is killed or stopped."
LAYOUTS = {"uni": ([], "engine"), "TP 2": (["--tensor-parallel-size", "2"], "worker")}
"""By name: arguments of `quire serve`, and the role of the process that computes."""
CASES = ((1, signal.SIGKILL), (64, signal.SIGKILL), (1, signal.SIGSTOP))
TOKENS_BEFORE = 5
"""Of each stream, before the fault."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="Of %(default)s.")
    parser.add_argument("--tokens", type=int, default=300, help="Of each stream (default: %(default)s).")
    parser.add_argument(
        "--settle", type=float, default=12, help="Seconds before each fault: the spare starts (default: %(default)g)."
    )


def run(args: argparse.Namespace) -> int:
    model = [args.model] if args.model else []
    print("| layout | process | signal | streams | median pause s | longest s | load |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for name in args.layouts.split(","):
        options, role = LAYOUTS[name]
        with Server([*model, *options, "--max-num-seqs", "64"]) as server:
            for streams, number in CASES:
                time.sleep(args.settle)
                pauses = asyncio.run(_measure(server, role, number, streams, args.tokens))
                print(
                    f"| {name} | {role} | {number.name} | {streams} | {statistics.median(pauses):.2f} | "
                    f"{max(pauses):.2f} | {os.getloadavg()[0]:.1f} |",
                    flush=True,
                )
        server.log.unlink()
    return 0


async def _measure(server: Server, role: str, number: signal.Signals, streams: int, tokens: int) -> list[float]:
    """Signals the busiest process of the role while streams run; returns each one's longest pause after it, seconds."""
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=httpx.Limits()) as client:
        names = (await client.get("/v1/models")).json()
        model = names["data"][0]["id"]
        before = {process: _seconds_computed(process) for process in server.processes()[role]}
        await _Stream(client, model, tokens, streams).run()
        victim = max(before, key=lambda process: _seconds_computed(process) - before[process])  # the others are spare
        watched = [_Stream(client, model, tokens, seed) for seed in range(streams)]
        tasks = [asyncio.create_task(each.run()) for each in watched]
        await asyncio.gather(*(each.has_begun.wait() for each in watched))
        struck = time.monotonic()
        victim.send_signal(number)
        await asyncio.gather(*tasks)
    return [each.longest_pause(struck) for each in watched]


def _seconds_computed(process: psutil.Process) -> float:
    spent = process.cpu_times()
    return spent.user + spent.system


class _Stream:
    """One completion's stream, and when its events came.

    Attributes:
        has_begun: set when `TOKENS_BEFORE` events have come.
    """

    def __init__(self, client: httpx.AsyncClient, model: str, tokens: int, seed: int) -> None:
        self._client = client
        self._body = {
            "model": model, "prompt": [5, 6, 7, 8], "max_tokens": tokens, "temperature": 0.9, "seed": seed,
            "ignore_eos": True, "stream": True,
        }  # fmt: skip
        self._times: list[float] = []
        self.has_begun = asyncio.Event()

    async def run(self) -> None:
        """Reads the stream to its end.

        Raises:
            ServerError: the stream has an error.
        """
        async with self._client.stream("POST", "/v1/completions", json=self._body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith('data: {"error"'):
                    raise ServerError(line)
                if line.startswith("data: {"):
                    self._times.append(time.monotonic())
                    if len(self._times) == TOKENS_BEFORE:
                        self.has_begun.set()

    def longest_pause(self, since: float) -> float:
        """Seconds between two events of which the second came after a time."""
        return max((after - before for before, after in itertools.pairwise(self._times) if after > since), default=0.0)
