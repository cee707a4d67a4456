"""Kills and stops processes of a server, one after another."""

import asyncio
import contextlib
import random
import signal
from collections import Counter
from typing import Any

import httpx
import psutil
from server import Server

KINDS = {
    "kill engine": ("engine", signal.SIGKILL),
    "stop engine": ("engine", signal.SIGSTOP),
    "kill worker": ("worker", signal.SIGKILL),
    "stop worker": ("worker", signal.SIGSTOP),
    "kill helper": ("helper", signal.SIGKILL),
}


class Faults:
    """Injects one fault after another, each some seconds after the server has recovered from the one before.

    Args:
        kinds: of `KINDS`, in turns; those without such a process are left out.
        pause_seconds: the longest time between a recovery and the next fault.
    """

    def __init__(self, server: Server, kinds: list[str], rng: random.Random, pause_seconds: float) -> None:
        self._server = server
        self._kinds = kinds
        self._rng = rng
        self._pause_seconds = pause_seconds
        self.counts: Counter[str] = Counter()
        self.recoveries: list[float] = []

    async def run(self, until: float) -> None:
        """Injects faults until the loop's time `until`, and waits for the last recovery."""
        loop, turn = asyncio.get_running_loop(), 0
        while loop.time() < until:
            await asyncio.sleep(self._rng.uniform(0.3, 1) * self._pause_seconds)
            kind = self._kinds[turn % len(self._kinds)]
            turn += 1
            role, number = KINDS[kind]
            victims = (await asyncio.to_thread(self._server.processes)).get(role, [])
            if not victims or loop.time() >= until:
                continue
            victim = self._rng.choice(victims)
            with contextlib.suppress(psutil.Error):
                victim.send_signal(number)
                self.counts[kind] += 1
                if role != "helper":
                    await self._until_recovered(victim)

    async def _until_recovered(self, victim: psutil.Process) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        while loop.time() - started < 400:
            await asyncio.sleep(0.05)
            if not _is_gone(victim):
                continue
            with contextlib.suppress(httpx.HTTPError, ValueError):
                if _serves(await asyncio.to_thread(self._server.health)):
                    self.recoveries.append(loop.time() - started)
                    return
        raise SystemExit(f"the server did not recover from the end of {victim.pid}; its log: {self._server.log}")


def _is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


def _serves(health: dict[str, Any]) -> bool:
    states = [each["state"] for each in health.get("engines") or [health.get("engine") or {"state": None}]]
    return health["status"] == 200 and set(states) == {"serving"}
