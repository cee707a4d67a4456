"""Streams of all kinds while processes of the server are killed and stopped: none may be lost or changed."""

import argparse
import asyncio
import random
import statistics
from collections import Counter
from dataclasses import dataclass, field

import httpx
from faults import KINDS, Faults
from server import Server
from streams import Outcome, Request, ask, make_requests, references

NAME = "streams"
SUMMARY = "Streams of all kinds while processes are killed and stopped."
LAYOUTS = {
    "uni": [],
    "mp": ["--distributed-executor-backend", "mp"],
    "TP 2": ["--tensor-parallel-size", "2"],
    "DP 2": ["--data-parallel-size", "2"],
}
COMMON = ["--num-gpu-blocks-override", "4096", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
NAMED = 5
"""Lost and wrong answers that are printed in full."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=600, help="For all layouts together (default: %(default)g).")
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="Of %(default)s.")
    parser.add_argument("--faults", default=",".join(KINDS), help="Of %(default)s.")
    parser.add_argument("--concurrency", type=int, default=12, help="Streams at once (default: %(default)s).")
    parser.add_argument("--pause", type=float, default=4, help="Most seconds from a recovery to the next fault.")
    parser.add_argument("--variants", type=int, default=3, help="Requests of each kind (default: %(default)s).")
    parser.add_argument("--long", type=int, default=600, help="Tokens of a long prompt (default: %(default)s).")
    parser.add_argument("--seed", type=int, default=0)


@dataclass
class Tally:
    """What became of the streams of one layout."""

    done: Counter[str] = field(default_factory=Counter)  # by kind
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)

    def add(self, request: Request, outcome: Outcome, expected: Outcome) -> None:
        """Counts one answer."""
        self.done[request.kind] += 1
        self.pauses.append(outcome.longest_pause)
        if outcome.error is not None:
            self.lost.append(f"{request.kind}: {outcome.error}")
        elif not outcome.matches(expected):
            self.wrong.append(f"{request.kind}: {outcome.choices} and not {expected.choices}")


def run(args: argparse.Namespace) -> int:
    names = args.layouts.split(",")
    rows, is_clean = [], True
    for name in names:
        tally, faults, left = asyncio.run(_one_layout(args, name, args.seconds / len(names)))
        is_clean = is_clean and not (tally.lost or tally.wrong or left)
        rows.append(_row(name, tally, faults))
        for title, found in (("lost", tally.lost), ("wrong", tally.wrong), ("left behind", left)):
            for line in found[:NAMED]:
                print(f"{name}, {title}: {line}", flush=True)
    print("| layout | streams | lost | wrong | faults | recovery s, median and longest | pause s, 99 % and longest |")
    print("|---|---|---|---|---|---|---|")
    print("\n".join(rows))
    return 0 if is_clean else 1


async def _one_layout(args: argparse.Namespace, name: str, seconds: float) -> tuple[Tally, Faults, list[str]]:
    model = [args.model] if args.model else []
    requests = make_requests(args.seed, args.variants, args.long)
    rng, tally = random.Random(args.seed), Tally()
    with Server([*model, *COMMON, *LAYOUTS[name]]) as server:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits) as client:
            client.headers["Authorization"] = "Bearer none"
            names = (await client.get("/v1/models")).json()
            for request in requests:
                request.body["model"] = names["data"][0]["id"]
            expected = await references(client, requests, args.concurrency)
            faults = Faults(server, args.faults.split(","), rng, args.pause)
            until = asyncio.get_running_loop().time() + seconds
            injecting = asyncio.create_task(faults.run(until))

            async def work(offset: int) -> None:
                place = offset
                while not injecting.done():
                    number = place % len(requests)
                    tally.add(requests[number], await ask(client, requests[number]), expected[number])
                    place += args.concurrency

            await asyncio.gather(injecting, *map(work, range(args.concurrency)))
            for _ in range(100):
                if await asyncio.to_thread(server.is_idle):
                    break
                await asyncio.sleep(0.1)
            else:
                tally.lost.append("pages or requests are in use after the last answer")
        server.processes()
        code = server.stop()
        if code != 0:
            tally.lost.append(f"the server ended with {code}; its log: {server.log}")
        if tally.lost or tally.wrong:
            print(f"{name}: the server's log is {server.log}", flush=True)
        else:
            server.log.unlink()
        return tally, faults, server.left_behind()


def _row(name: str, tally: Tally, faults: Faults) -> str:
    counts = ", ".join(f"{count} {kind}" for kind, count in faults.counts.items()) or "none"
    recoveries = faults.recoveries or [0.0]
    pauses = sorted(tally.pauses)
    return (
        f"| {name} | {sum(tally.done.values())} | {len(tally.lost)} | {len(tally.wrong)} | {counts} | "
        f"{statistics.median(recoveries):.1f}, {max(recoveries):.1f} | "
        f"{pauses[int(0.99 * (len(pauses) - 1))]:.1f}, {pauses[-1]:.1f} |"
    )
