"""Many large bodies at once, and one far past the limit: health stays quick, and memory bounded."""

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import Future, ProcessPoolExecutor

import httpx
import psutil
from server import Server

NAME = "bodies"
SUMMARY = "Large bodies beside each other, with health's latency and the server's memory."
CHUNK_BYTES = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bodies", type=int, default=256, help="At the same time (default: %(default)s).")
    parser.add_argument("--megabytes", type=float, default=8, help="Of each (default: %(default)g).")
    parser.add_argument("--huge", type=int, default=600, help="MB of a body without a length (default: %(default)s).")
    parser.add_argument("--budget", default="256M", help="--max-inflight-body-bytes (default: %(default)s).")


def run(args: argparse.Namespace) -> int:
    model = [args.model] if args.model else []
    options = ["--num-gpu-blocks-override", "512", "--max-inflight-body-bytes", args.budget]
    kinds = (
        (f"{args.bodies} bodies of {args.megabytes:g} MB", args.bodies, int(args.megabytes * 2**20), False),
        (f"one of {args.huge} MB", 1, args.huge * 2**20, True),
    )
    with Server([*model, *options]) as server, ProcessPoolExecutor(1) as pool:  # the senders must not delay the checks
        process = psutil.Process(server.process.pid)
        print("| request | answers | health checks | median ms | longest ms | server's memory before | at most |")
        print("|---|---|---|---|---|---|---|")
        for name, count, num_bytes, in_chunks in kinds:
            before = process.memory_info().rss
            sending = pool.submit(_send, server.url, count, num_bytes, in_chunks)
            times, most = _watch(server.url, process, sending)
            told = ", ".join(f"{number} × {status}" for status, number in sorted(sending.result().items()))
            print(
                f"| {name} | {told} | {len(times)} | {1000 * sorted(times)[len(times) // 2]:.1f} | "
                f"{1000 * max(times):.1f} | {before / 2**20:.0f} MiB | {most / 2**20:.0f} MiB |"
            )
        server.log.unlink()
    return 0


def _watch(url: str, process: psutil.Process, sending: "Future[Counter[str]]") -> tuple[list[float], int]:
    """Seconds of health checks, one after the other until all is sent, and the most memory of the server's process."""
    times, most = [], 0
    with httpx.Client(base_url=url, timeout=600) as client:
        while not sending.done() or not times:
            started = time.monotonic()
            client.get("/health").raise_for_status()
            times.append(time.monotonic() - started)
            most = max(most, process.memory_info().rss)
            time.sleep(0.02)
    return times, most


def _send(url: str, count: int, num_bytes: int, in_chunks: bool) -> Counter[str]:
    """Sends equal bodies at the same time; returns how often each status was answered, or each error happened."""

    async def send() -> Counter[str]:
        body = b'{"prompt": "' + b"a" * (num_bytes - 100) + b'"}'
        async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits()) as client:
            sent = (_post(client, _chunks(body) if in_chunks else body) for _ in range(count))
            return Counter(await asyncio.gather(*sent))

    return asyncio.run(send())


async def _post(client: httpx.AsyncClient, content: bytes | AsyncIterator[bytes]) -> str:
    try:
        headers = {"Content-Type": "application/json"}
        return str((await client.post("/v1/completions", content=content, headers=headers)).status_code)
    except httpx.HTTPError as error:
        return type(error).__name__


async def _chunks(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), CHUNK_BYTES):
        yield body[start : start + CHUNK_BYTES]
