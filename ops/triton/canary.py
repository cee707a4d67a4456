"""Finds the operations whose kernels do not work on this card, before requests do.

On the first start with a card, a driver, a version of Triton and our sources, each operation runs once on its kernels
and once in plain torch, in a child process: an illegal access ends a process's use of the card, and a kernel may hang.
What was found is kept in the cache folder. Operations that failed are served by plain torch.
"""

import contextlib
import fcntl
import hashlib
import importlib
import json
import logging
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

import torch
import triton

import quire.ops.eager
import quire.ops.triton
from quire.ops.triton.canary_inputs import UNDECIDED, Case
from quire.ops.triton.jobs import cache_folder

logger = logging.getLogger(__name__)

SUITE = "quire.ops.triton.canary_cases"
MAX_START_SECONDS = 120.0
"""For the child's imports, and the first kernels that it loads."""
MAX_CASE_SECONDS = 60.0
"""For a case: its kernels may be compiled first, while other processes use the processors."""


class Canary:
    """The cases of a suite, and what was found about them.

    Args:
        folder: where findings are kept.
        circumstances: what findings depend on.
        suite: a module as `canary_cases.py`.
        max_case_seconds: a case that takes longer is taken to hang.
    """

    def __init__(
        self,
        folder: Path,
        circumstances: Sequence[str],
        *,
        suite: str = SUITE,
        max_case_seconds: float = MAX_CASE_SECONDS,
    ) -> None:
        self._suite = suite
        self._max_case_seconds = max_case_seconds
        self._cases: tuple[Case, ...] = importlib.import_module(suite).CASES
        key = hashlib.sha256("\0".join(circumstances).encode()).hexdigest()[:20]
        self._path = folder / f"canary-{key}.json"
        self._thread: threading.Thread | None = None
        self._faults: dict[str, str] = {}

    @classmethod
    def of_this_card(cls) -> "Canary":
        """The canary for torch's current device, its driver, Triton and our sources."""
        card = torch.cuda.get_device_name()
        driver = Path("/proc/driver/nvidia/version")
        version = driver.read_text() if driver.exists() else str(torch.version.cuda)
        return cls(cache_folder(), [card, version, triton.__version__, torch.__version__, _digest_of_sources()])

    @property
    def is_decided(self) -> bool:
        """True if findings were kept by an earlier start."""
        return self._path.exists()

    def start(self, prepare: Callable[[], None] = lambda: None) -> None:
        """Begins to run the cases beside whatever this process does, unless findings were kept.

        `prepare` runs before them.
        """
        if not self.is_decided:
            self._thread = threading.Thread(target=self._find, args=(prepare,), name="canary", daemon=True)
            self._thread.start()

    def broken_operations(self) -> set[str]:
        """The operations to leave to plain torch, after the end of the cases; one warning names them."""
        if self._thread is not None:
            self._thread.join()
        with contextlib.suppress(OSError, ValueError):  # it cannot be kept: then it was found by this process
            self._faults = json.loads(self._path.read_text())
        broken = {each for case in self._cases if self._faults.get(case.name) for each in case.operations}
        if broken:
            reasons = "; ".join(f"{name}: {fault}" for name, fault in self._faults.items() if fault)
            logger.warning(
                "kernels do not work on this card, so plain torch serves %s, which is slower: %s. To test them again, "
                "delete %s.",
                *(", ".join(sorted(broken)), reasons, self._path),
            )
        return broken

    def _find(self, prepare: Callable[[], None]) -> None:
        """Runs all cases and keeps what was found; of several processes, one does."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with self._path.with_suffix(".lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not self.is_decided:
                    prepare()
                    self._faults = self._run_cases()
                    if any(fault.startswith(UNDECIDED) for fault in self._faults.values()):
                        return  # the next start tests them again
                    scratch = self._path.with_suffix(".new")
                    scratch.write_text(json.dumps(self._faults, indent=1))
                    scratch.replace(self._path)
        except OSError as error:
            logger.info("the findings about kernels cannot be kept, so the next start tests them again: %s", error)
            self._faults = self._faults or self._run_cases()

    def _run_cases(self) -> dict[str, str]:
        faults: dict[str, str] = {}
        waiting = [case.name for case in self._cases]
        while waiting:
            found = self._run_child(waiting)
            faults |= found
            waiting = [name for name in waiting if name not in found]
        return faults

    def _run_child(self, names: Sequence[str]) -> dict[str, str]:
        """Runs cases until one of them faults or hangs; returns what was found, at least one finding."""
        command = [sys.executable, "-m", "quire.ops.triton.canary_process", self._suite, *names]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(each for each in sys.path if each)}
        found: dict[str, str] = {}
        running: str | None = None
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
            assert child.stdout is not None
            lines = _read(child.stdout)
            try:
                while True:
                    line = lines.get(timeout=MAX_START_SECONDS if running is None else self._max_case_seconds)
                    if line is None:
                        break
                    name, *faults = json.loads(line)
                    running = None if faults else name
                    if faults:
                        [found[name]] = faults
            except queue.Empty:
                found[running or names[len(found)]] = f"no result after {self._max_case_seconds:.0f} s"
                return found
            finally:
                child.kill()
        unfinished = [name for name in names if name not in found]
        if unfinished:
            found[unfinished[0]] = f"the process ended with status {child.returncode}"
        return found


def _read(stream: IO[str]) -> "queue.Queue[str | None]":
    """The lines of a stream as they come, and None at its end."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in stream:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    return lines


def _digest_of_sources() -> str:
    digest = hashlib.sha256()
    for path in _sources():
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _sources() -> Iterator[Path]:
    for package in (quire.ops.eager, quire.ops.triton):
        yield from sorted(Path(package.__path__[0]).rglob("*.py"))
