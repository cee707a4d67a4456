"""Kills and stops processes of a server, one after another."""

import asyncio
import contextlib
import random
import signal
import time
from collections import Counter
from typing import Any

import httpx
import psutil
from server import Server, ServerError

KINDS = {
    "kill engine": ("engine", signal.SIGKILL),
    "stop engine": ("engine", signal.SIGSTOP),
    "kill worker": ("worker", signal.SIGKILL),
    "stop worker": ("worker", signal.SIGSTOP),
    "kill helper": ("helper", signal.SIGKILL),
    "kill media helper": ("media", signal.SIGKILL),
}
_HELPERS = ("helper", "media")
"""Roles of processes without which the server goes on."""
RECOVERY_SECONDS = 100.0
"""A server that does not serve again after this time counts as lost."""
MIN_PAUSE_SECONDS = 0.2


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

    @property
    def num(self) -> int:
        """Faults so far."""
        return sum(self.counts.values())

    async def run(self, end: float) -> None:
        """Injects faults until CLOCK_MONOTONIC is `end`, one at least, and no more when no recovery would fit.

        Raises:
            ServerError: the server did not recover from one.
        """
        turn = 0
        while True:
            pause = self._rng.uniform(0.3, 1) * self._pause_seconds
            await asyncio.sleep(min(pause, max(MIN_PAUSE_SECONDS, self._seconds_left(end))))
            turn = await self._inject(turn)
            if self._seconds_left(end) <= 0:
                break
        await asyncio.sleep(max(0.0, end - time.monotonic()))

    def _seconds_left(self, end: float) -> float:
        """Seconds in which a fault leaves time for as long a recovery as there was."""
        return end - time.monotonic() - max(self.recoveries, default=0.0)

    async def _inject(self, turn: int) -> int:
        """Injects the next fault for which there is a process, and waits for the recovery. Returns the turn after."""
        processes = await asyncio.to_thread(self._server.processes)
        kinds = [(place, self._kinds[place % len(self._kinds)]) for place in range(turn, turn + len(self._kinds))]
        for place, kind in kinds:
            role, number = KINDS[kind]
            if not (victims := processes.get(role)):
                continue
            victim = self._rng.choice(victims)
            with contextlib.suppress(psutil.Error):
                victim.send_signal(number)
                self.counts[kind] += 1
                if role not in _HELPERS:
                    await self._until_recovered(victim)
            return place + 1
        return turn

    async def _until_recovered(self, victim: psutil.Process) -> None:
        started = time.monotonic()
        while time.monotonic() - started < RECOVERY_SECONDS:
            await asyncio.sleep(0.05)
            if not _is_gone(victim):
                continue
            with contextlib.suppress(httpx.HTTPError, ValueError):
                if _serves(await asyncio.to_thread(self._server.health)):
                    self.recoveries.append(time.monotonic() - started)
                    return
        raise ServerError(f"the server did not recover from the end of {victim.pid}; its log: {self._server.log}")


def _is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


def _serves(health: dict[str, Any]) -> bool:
    states = [each["state"] for each in health.get("engines") or [health.get("engine") or {"state": None}]]
    return health["status"] == 200 and set(states) == {"serving"}
