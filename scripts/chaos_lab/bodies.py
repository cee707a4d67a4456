"""Many large bodies at once, and one far past the limit: health stays quick, and memory bounded."""

import argparse
import asyncio
import collections
import json
import time
from collections.abc import AsyncIterator

import httpx
import psutil
from server import Server

NAME = "bodies"
SUMMARY = "Large bodies beside each other, with health's latency and the server's memory."
CHUNK = b"a" * (1 << 20)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bodies", type=int, default=256, help="At the same time (default: %(default)s).")
    parser.add_argument("--megabytes", type=float, default=8, help="Of each (default: %(default)g).")
    parser.add_argument("--huge", type=int, default=600, help="MB of a body without a length (default: %(default)s).")
    parser.add_argument("--budget", default="256M", help="--max-inflight-body-bytes (default: %(default)s).")


def run(args: argparse.Namespace) -> int:
    asyncio.run(_measure(args))
    return 0


async def _measure(args: argparse.Namespace) -> None:
    model = [args.model] if args.model else []
    body = json.dumps({"prompt": "a" * int(args.megabytes * 2**20 - 100), "max_tokens": 1}).encode()
    options = ["--num-gpu-blocks-override", "512", "--max-inflight-body-bytes", args.budget]
    with Server([*model, *options]) as server:
        process = psutil.Process(server.process.pid)
        print("| request | answers | health checks | median ms | longest ms | server's memory before | at most |")
        print("|---|---|---|---|---|---|---|")
        async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=httpx.Limits()) as client:
            for name, count in ((f"{args.bodies} bodies of {args.megabytes:g} MB", args.bodies), ("one huge", 1)):
                before = process.memory_info().rss
                watch = asyncio.create_task(_watch(server, process))
                sent = (_post(client, body if count > 1 else _huge(args.huge)) for _ in range(count))
                answers = collections.Counter(await asyncio.gather(*sent))
                watch.cancel()
                times, most = await watch
                told = ", ".join(f"{number} × {status}" for status, number in sorted(answers.items()))
                print(
                    f"| {name} | {told} | {len(times)} | {1000 * sorted(times)[len(times) // 2]:.1f} | "
                    f"{1000 * max(times):.1f} | {before / 2**20:.0f} MiB | {most / 2**20:.0f} MiB |"
                )
        server.log.unlink()


async def _watch(server: Server, process: psutil.Process) -> tuple[list[float], int]:
    """Seconds of health checks, one after the other until cancelled, and the most memory."""
    times, most = [0.0], 0
    try:
        async with httpx.AsyncClient(base_url=server.url, timeout=600) as client:
            while True:
                started = time.monotonic()
                (await client.get("/health")).raise_for_status()
                times.append(time.monotonic() - started)
                most = max(most, process.memory_info().rss)
                await asyncio.sleep(0.02)
    except asyncio.CancelledError:
        return times, most


async def _post(client: httpx.AsyncClient, content: bytes | AsyncIterator[bytes]) -> str:
    try:
        headers = {"Content-Type": "application/json"}
        return str((await client.post("/v1/completions", content=content, headers=headers)).status_code)
    except httpx.HTTPError as error:
        return type(error).__name__


async def _huge(megabytes: int) -> AsyncIterator[bytes]:
    yield b'{"prompt": "'
    for _ in range(megabytes):
        yield CHUNK
