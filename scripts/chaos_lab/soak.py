"""Many short requests, of which clients leave some at any moment: memory, pages and descriptors stay as they were."""

import argparse
import asyncio
import contextlib
import random
import statistics
from collections import defaultdict

import httpx
import psutil
from cut import exit_code, run_until_cut
from server import Server

NAME = "soak"
SUMMARY = "Short requests with random disconnects: memory, pages, descriptors."
WARM_UP = 0.4
"""The part of the requests after which memory should be flat."""
MOST_BYTES = 300.0
"""The growth of a process's memory a request that counts as flat: 6 MB in 20,000."""
MOST_PROBLEMS = 5
"""Bad answers that are printed."""
SAMPLE_SECONDS = 1.0
SAMPLES_A_LINE = 10
PAGES = 512
"""So few that the prefix cache has used each of them during the warm-up: its tables grow until then."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--leave", type=float, default=0.3, help="Share of clients that leave (default: %(default)g).")
    parser.add_argument("--seed", type=int, default=0)


class Samples:
    """Memory and descriptors of each process, by the number of requests done.

    Attributes:
        num_done: requests so far.
        problems: what is wrong besides, in words.
    """

    def __init__(self) -> None:
        self.num_done = 0
        self.problems: list[str] = []
        self.memory: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self.files: dict[str, list[int]] = defaultdict(list)

    def take(self, server: Server) -> None:
        """Takes one sample of each process."""
        for role, processes in server.processes().items():
            for number, process in enumerate(processes):
                with contextlib.suppress(psutil.Error):
                    name = f"{role} {number}" if len(processes) > 1 else role
                    self.memory[name].append((self.num_done, process.memory_full_info().uss))
                    self.files[name].append(process.num_fds())


def run(args: argparse.Namespace) -> int:
    samples = Samples()
    problems = samples.problems
    cut = run_until_cut(_soak(args, samples))
    if cut is not None:
        print(f"The run was cut after {samples.num_done} requests; these are its figures.")
    print("| process | memory at the middle | at the end | slope, bytes a request | descriptors, first and last |")
    print("|---|---|---|---|---|")
    for name, points in samples.memory.items():
        late = [point for point in points if point[0] > WARM_UP * samples.num_done]
        if len({num_done for num_done, _ in late}) < 3:
            continue
        slope = statistics.linear_regression(*zip(*late, strict=True)).slope
        files = samples.files[name][-len(late) :]
        print(
            f"| {name} | {late[0][1] / 2**20:.1f} MiB | {late[-1][1] / 2**20:.1f} MiB | {slope:.0f} | "
            f"{files[0]}, {files[-1]} |"
        )
        if slope > MOST_BYTES:
            problems.append(f"the memory of {name} grows by {slope:.0f} bytes a request")
        if samples.files[name][-1] > files[0] + 2 * args.concurrency:
            problems.append(f"{name} has {files[-1]} descriptors after {files[0]}")
    print("\n".join(problems) or "Memory and descriptors are flat, all pages are free.")
    return exit_code(cut, is_clean=not problems)


async def _soak(args: argparse.Namespace, samples: Samples) -> None:
    model = [args.model] if args.model else []
    rng, problems = random.Random(args.seed), samples.problems
    with Server([*model, "--num-gpu-blocks-override", str(PAGES)]) as server:
        # Idle connections end here and not at the server, which may close one just as a request is written to it.
        limits = httpx.Limits(max_keepalive_connections=args.concurrency, keepalive_expiry=1)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
            name = (await client.get("/v1/models")).json()["data"][0]["id"]

            async def work() -> None:
                while samples.num_done < args.requests:
                    samples.num_done += 1
                    body = {
                        "model": name,
                        "prompt": [rng.randrange(10, 250) for _ in range(rng.randrange(1, 30))],
                        "max_tokens": rng.randrange(1, 12),
                        "ignore_eos": True,
                        "stream": rng.random() < 0.7,
                        "seed": rng.randrange(2**31),
                    }
                    seconds = rng.expovariate(50) if rng.random() < args.leave else 120
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(seconds):
                            await _read(client, body, problems)

            working = asyncio.gather(*(work() for _ in range(args.concurrency)))
            number = 0
            while not working.done():
                await asyncio.wait([working], timeout=SAMPLE_SECONDS)
                await asyncio.to_thread(samples.take, server)
                number += 1
                if number % SAMPLES_A_LINE == 0:
                    print(f"{samples.num_done} requests, {len(problems)} problems", flush=True)
            await working
            for _ in range(100):
                if await asyncio.to_thread(server.is_idle):
                    break
                await asyncio.sleep(0.1)
            else:
                problems.append(f"pages or requests are in use at the end: {server.metrics()}")
        samples.take(server)
        if server.stop():
            problems.append("the server did not end with 0")
        server.log.unlink()


async def _read(client: httpx.AsyncClient, body: dict[str, object], problems: list[str]) -> None:
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            async for _ in answer.aiter_bytes():
                pass
    except httpx.TransportError as error:
        problem = repr(error)
    else:
        problem = "" if answer.status_code == 200 else f"a request was answered {answer.status_code}"
    if problem and len(problems) < MOST_PROBLEMS:
        problems.append(problem)
