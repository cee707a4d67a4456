"""Streams of all kinds while processes of the server are killed and stopped: none may be lost or changed."""

import argparse
import asyncio
import contextlib
import random
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field

import httpx
from cut import exit_code, run_until_cut
from faults import KINDS, Faults
from server import Server, ServerError
from streams import (
    ADAPTER,
    Outcome,
    Request,
    ask,
    make_adapter_requests,
    make_image_requests,
    make_requests,
    make_sound_requests,
    references,
)

NAME = "streams"
SUMMARY = "Streams of all kinds while processes are killed and stopped."
LAYOUTS = {
    "uni": [],
    "mp": ["--distributed-executor-backend", "mp"],
    "TP 2": ["--tensor-parallel-size", "2"],
    "DP 2": ["--data-parallel-size", "2"],
    "PP 2": ["--pipeline-parallel-size", "2"],
}
DEFAULT_LAYOUTS = "uni,mp,TP 2,DP 2"
COMMON = ["--num-gpu-blocks-override", "4096", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
NAMED = 5
"""Lost and wrong answers that are printed in full."""
END_SECONDS = 4.0
"""Time that a layout's last streams and the server's end take."""
PROGRESS_SECONDS = 10.0
IDLE_SECONDS = 10.0
"""Time after the last answer in which the server has to be idle."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seconds", type=float, default=600, help="For all layouts, starts and ends included (default: %(default)g)."
    )
    parser.add_argument("--layouts", default=DEFAULT_LAYOUTS, help=f"Of {','.join(LAYOUTS)} (default: %(default)s).")
    parser.add_argument("--faults", default=",".join(KINDS), help="Of %(default)s.")
    parser.add_argument(
        "--media",
        choices=["images", "sounds"],
        help="Requests with images beside the others, or transcriptions alone, for a model that reads such.",
    )
    parser.add_argument("--adapter", metavar="FOLDER", help="A LoRA adapter of the model, which some requests name.")
    parser.add_argument("--concurrency", type=int, default=12, help="Streams at once (default: %(default)s).")
    parser.add_argument("--pause", type=float, default=4, help="Most seconds from a recovery to the next fault.")
    parser.add_argument("--variants", type=int, default=3, help="Requests of each kind (default: %(default)s).")
    parser.add_argument("--long", type=int, default=600, help="Tokens of a long prompt (default: %(default)s).")
    parser.add_argument("--seed", type=int, default=0)


@dataclass
class Tally:
    """What became of the streams of one layout."""

    name: str
    began: float = field(default_factory=time.monotonic)
    done: Counter[str] = field(default_factory=Counter)  # by kind
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    left: list[str] = field(default_factory=list)  # processes that outlived the server
    faults: Faults | None = None

    @property
    def is_clean(self) -> bool:
        return not (self.lost or self.wrong or self.left)

    def add(self, request: Request, outcome: Outcome, expected: Outcome) -> None:
        """Counts one answer."""
        self.done[request.kind] += 1
        self.pauses.append(outcome.longest_pause)
        if outcome.error is not None:
            self.lose(f"{request.kind}: {outcome.error}")
        elif not outcome.matches(expected):
            self.wrong.append(f"{request.kind}: {outcome.choices} and not {expected.choices}")
            self._tell("wrong", self.wrong)

    def lose(self, what: str) -> None:
        """Notes that something was lost."""
        self.lost.append(what)
        self._tell("lost", self.lost)

    def leave_behind(self, found: list[str]) -> None:
        """Notes the processes that outlived the server."""
        for each in found:
            self.left.append(each)
            self._tell("left behind", self.left)

    def say_state(self) -> None:
        """Prints the counts so far."""
        faults = self.faults.num if self.faults is not None else 0
        print(
            f"{self.name}, {time.monotonic() - self.began:.0f} s: {sum(self.done.values())} streams, "
            f"{len(self.lost)} lost, {len(self.wrong)} wrong, {faults} faults",
            flush=True,
        )

    def row(self) -> str:
        """The layout's row of the table."""
        counts = {} if self.faults is None else self.faults.counts
        recoveries = (self.faults.recoveries if self.faults is not None else []) or [0.0]
        pauses = sorted(self.pauses) or [0.0]
        return (
            f"| {self.name} | {sum(self.done.values())} | {len(self.lost)} | {len(self.wrong)} | "
            f"{', '.join(f'{count} {kind}' for kind, count in counts.items()) or 'none'} | "
            f"{statistics.median(recoveries):.1f}, {max(recoveries):.1f} | "
            f"{pauses[int(0.99 * (len(pauses) - 1))]:.1f}, {pauses[-1]:.1f} |"
        )

    def _tell(self, title: str, found: list[str]) -> None:
        if len(found) <= NAMED:
            print(f"{self.name}, {title}: {found[-1]}", flush=True)


def run(args: argparse.Namespace) -> int:
    names = args.layouts.split(",")
    end, cut, tallies = time.monotonic() + args.seconds, None, list[Tally]()
    for number, name in enumerate(names):
        now = time.monotonic()
        tallies.append(Tally(name, now))
        cut = run_until_cut(_one_layout(args, tallies[-1], now + max(0.0, end - now) / (len(names) - number)))
        if cut is not None:
            print(f"The run was cut in layout {name}; these are the counts so far.")
            break
    print("| layout | streams | lost | wrong | faults | recovery s, median and longest | pause s, 99 % and longest |")
    print("|---|---|---|---|---|---|---|")
    print("\n".join(tally.row() for tally in tallies))
    return exit_code(cut, is_clean=all(tally.is_clean for tally in tallies))


async def _one_layout(args: argparse.Namespace, tally: Tally, end: float) -> None:
    """Serves one layout until CLOCK_MONOTONIC is `end`, and counts in `tally`."""
    model = [args.model] if args.model else []
    requests = _requests(args)
    adapter = ["--enable-lora", "--lora-modules", f"{ADAPTER}={args.adapter}"] if args.adapter else []
    common = COMMON if args.media is None else COMMON[:2]
    server = Server([*model, *common, *adapter, *LAYOUTS[tally.name]])
    telling = asyncio.create_task(_say_progress(tally))
    try:
        await asyncio.to_thread(server.wait_until_ready)
        await _ask_all(args, tally, server, requests, end - END_SECONDS)
    except* ServerError as group:
        for error in group.exceptions:
            tally.lose(str(error))
    finally:
        telling.cancel()
        _end(tally, server)


def _requests(args: argparse.Namespace) -> list[Request]:
    """The requests that the model serves."""
    if args.media == "sounds":
        return make_sound_requests(args.seed, args.variants)
    made = make_requests(args.seed, args.variants, args.long)
    if args.media == "images":
        plain = [each for each in made if each.kind not in ("grammar", "tools")]
        made = plain + make_image_requests(args.seed, args.variants)
    return made + (make_adapter_requests(args.seed, args.variants) if args.adapter else [])


def _end(tally: Tally, server: Server) -> None:
    """Ends the server, and notes what is wrong with its end."""
    code = server.stop()
    if code != 0:
        tally.lose(f"the server ended with {code}; its log: {server.log}")
    tally.leave_behind(server.left_behind())
    if tally.lost or tally.wrong:
        print(f"{tally.name}: the server's log is {server.log}", flush=True)
    else:
        server.log.unlink()


async def _ask_all(args: argparse.Namespace, tally: Tally, server: Server, requests: list[Request], end: float) -> None:
    """Sends requests while faults happen, until CLOCK_MONOTONIC is `end`."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits) as client:
        client.headers["Authorization"] = "Bearer none"
        names = (await client.get("/v1/models")).json()
        for request in requests:
            request.body.setdefault("model", names["data"][0]["id"])
        expected = await references(client, requests, args.concurrency)
        tally.faults = Faults(server, args.faults.split(","), random.Random(args.seed), args.pause)

        async def work(offset: int) -> None:
            place = offset
            while not injecting.done() or place < len(requests):  # each at least once
                number = place % len(requests)
                tally.add(requests[number], await ask(client, requests[number]), expected[number])
                place += args.concurrency

        async with asyncio.TaskGroup() as group:
            injecting = group.create_task(tally.faults.run(end))
            for offset in range(args.concurrency):
                group.create_task(work(offset))
        deadline = time.monotonic() + IDLE_SECONDS
        while not await asyncio.to_thread(server.is_idle):
            if time.monotonic() > deadline:
                tally.lose("pages or requests are in use after the last answer")
                return
            await asyncio.sleep(0.1)


async def _say_progress(tally: Tally) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            tally.say_state()
