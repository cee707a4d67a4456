"""Thousands of idle connections, and clients that send a byte a second: health stays quick."""

import argparse
import asyncio
import contextlib
import resource
import time

import httpx
from server import Server

NAME = "connections"
SUMMARY = "Idle connections and clients with slow headers beside health checks."
MOST_SECONDS = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--idle", type=int, default=10_000)
    parser.add_argument("--slow", type=int, default=500, help="Clients that send a header's byte a second.")
    parser.add_argument("--seconds", type=float, default=20)


def run(args: argparse.Namespace) -> int:
    wanted = args.idle + args.slow + 1000
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < wanted:
        raise SystemExit(f"{wanted} descriptors are needed, and the limit is {most}: ulimit -Hn {wanted}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
    times = sorted(asyncio.run(_measure(args)))
    print("| idle connections | slow clients | health checks | median ms | 99 % ms | longest ms |")
    print("|---|---|---|---|---|---|")
    shown = [1000 * times[int(share * (len(times) - 1))] for share in (0.5, 0.99, 1)]
    print(f"| {args.idle} | {args.slow} | {len(times)} | " + " | ".join(f"{each:.1f}" for each in shown) + " |")
    return 0 if times[int(0.99 * (len(times) - 1))] < MOST_SECONDS else 1


async def _measure(args: argparse.Namespace) -> list[float]:
    model = [args.model] if args.model else []
    with Server([*model, "--num-gpu-blocks-override", "512"]) as server:
        writers: list[asyncio.StreamWriter] = []
        for start in range(0, args.idle, 200):
            count = min(200, args.idle - start)
            opened = await asyncio.gather(*(_connect(server.port) for _ in range(count)))
            writers += opened
        slow = [asyncio.create_task(_dribble(server.port)) for _ in range(args.slow)]
        times = []
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            deadline = time.monotonic() + args.seconds
            while time.monotonic() < deadline:
                started = time.monotonic()
                (await client.get("/health")).raise_for_status()
                times.append(time.monotonic() - started)
                await asyncio.sleep(0.05)
        for task in slow:
            task.cancel()
        for writer in writers:
            writer.transport.abort()
        server.log.unlink()
    return times


async def _connect(port: int) -> asyncio.StreamWriter:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    return writer


async def _dribble(port: int) -> None:
    """A request whose headers never end; begins again when the server has had enough."""
    while True:
        with contextlib.suppress(OSError):
            writer = await _connect(port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow: ")
            while not writer.is_closing():
                writer.write(b"a")
                await writer.drain()
                await asyncio.sleep(1)
