"""Builds of the kernels in the user's cache folder: one process runs each build, once; the others wait for it.

The kernels are several libraries. The main one has what every model needs, and each part (a folder in `parts/` of the
sources) what some models need besides. So the first start compiles no more than its model asks for.

A build's key is its part and a hash of everything that its result depends on: all headers, and the sources of the part
alone, so that a change in one part leaves the builds of the others. The folder holds these files for a key:

    kernels-KEY.so       the library,
    kernels-KEY.failed   the refusal, if the compiler refused: the build is not tried again,
    kernels-KEY.lock     a lock that the builder holds; the system releases it when the builder ends, however it ends,
    kernels-KEY.build    the builder's working files; if the lock is free, a killed builder left them behind.
"""

import fcntl
import hashlib
import json
import logging
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO

from quire.ops.cpu import builder

logger = logging.getLogger(__name__)

MAX_WAIT_SECONDS = 120.0
MAX_BUILD_SECONDS = 1800.0
_SECONDS_BETWEEN_LOOKS = 0.05
BACKGROUND_NICENESS = 10
_PARTS = "parts"
"""Folder of the parts' folders, and of what is compiled into each part."""


class BuildError(Exception):
    """There is no library; the text is one line with the reason and the remedy."""


class KernelBuild:
    """One library: its sources, compiler and flags."""

    def __init__(self, folder: Path, sources: Path, command: list[str], *circumstances: str, part: str = "") -> None:
        """Takes the cache's `folder`, and the compiler and its flags as `command`.

        `circumstances` are other conditions of the result, such as the compiler's name and version. Without a
        `part`, it is the main library.
        """
        self._folder = folder
        self._sources = sources
        self._part = part
        self._command = command
        name = f"kernels-{f'{part}-' if part else ''}{digest(sources, *command, *circumstances, part=part)}"
        self._library = folder / f"{name}.so"
        self._refusal = folder / f"{name}.failed"
        self._lock = folder / f"{name}.lock"
        self._scratch = folder / f"{name}.build"

    @property
    def is_decided(self) -> bool:
        """True if the cache has the library, or a refusal."""
        return self._library.exists() or self._refusal.exists()

    def library(self, max_wait_s: float = MAX_WAIT_SECONDS, max_build_s: float = MAX_BUILD_SECONDS) -> Path:
        """Path of the library, which is built if this folder has none yet.

        A build that takes longer than `max_wait_s` continues in the background, at a lower priority, for up to
        `max_build_s` in all; a later call finds its library.

        Raises:
            BuildError: the compiler refuses the sources, or has refused them before; or the build is not done yet.
            OSError: the folder cannot be written.
        """
        if self._library.exists():
            return self._library
        self._check_refusal()
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        deadline = time.monotonic() + max_wait_s
        with self._lock.open("a") as lock:
            while not _try_lock(lock):
                if time.monotonic() > deadline:
                    raise BuildError(
                        f"another process is building them, and was not done after {max_wait_s:.0f} s; the next start "
                        "will find what it builds."
                    )
                time.sleep(_SECONDS_BETWEEN_LOOKS)
            # The process that held the lock may have made this build.
            if not self._library.exists() and not self._refusal.exists():
                self._build(lock, deadline, max_wait_s, max_build_s)
        self._check_refusal()
        return self._library

    def _build(self, lock: IO[str], deadline: float, max_wait_s: float, max_build_s: float) -> None:
        self._remove_remains()
        logger.info("building the CPU kernels%s for this machine, once", f" ({self._part})" if self._part else "")
        started = time.monotonic()
        process = self._start(lock, max_build_s)
        try:
            _, told = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PGRP, process.pid, os.getpriority(os.PRIO_PROCESS, 0) + BACKGROUND_NICENESS)
            threading.Thread(target=self._await_late, args=(process, started), daemon=True).start()
            raise BuildError(
                f"building them takes longer than {max_wait_s:.0f} s. It goes on in the background; the next start "
                "will find what it builds."
            ) from None
        if self._library.exists():
            logger.info("CPU kernels built in %.1f s: %s", time.monotonic() - started, self._library)
        elif not self._refusal.exists():
            reason = told.splitlines()[-1] if told else f"exit status {process.returncode}"
            raise BuildError(f"the build was interrupted: {reason}; the next start will try again.")

    def _start(self, lock: IO[str], max_build_s: float) -> subprocess.Popen[str]:
        """Starts the builder. It inherits the lock, and holds it until it ends."""
        job = builder.Job(
            command=self._command, headers=str(self._sources), sources=sources_of(self._sources, self._part),
            scratch=str(self._scratch), library=str(self._library), max_seconds=max_build_s,
        )  # fmt: skip
        return subprocess.Popen(
            [sys.executable, "-I", "-S", builder.__file__, json.dumps(asdict(job)), str(self._refusal)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=(lock.fileno(),),
            start_new_session=True,  # so that neither Ctrl-C nor the end of the worker ends the builder
        )

    def _await_late(self, process: subprocess.Popen[str], started: float) -> None:
        process.communicate()
        if self._library.exists():
            seconds = time.monotonic() - started
            logger.info("CPU kernels built in %.1f s, for the next start: %s", seconds, self._library)

    def _check_refusal(self) -> None:
        try:
            lines = self._refusal.read_text().splitlines()
        except FileNotFoundError:
            return
        raise BuildError(
            f"{lines[0] if lines else 'they cannot be built'}. They are not built again before the sources or the "
            f"compiler change; to try again at the next start, delete {self._refusal}, which has the whole output."
        )

    def _remove_remains(self) -> None:
        """Removes the working files of builders that were killed."""
        for scratch in self._folder.glob("kernels-*.build"):
            with _lock_if_free(scratch.with_suffix(".lock")) as is_free:
                if is_free:
                    shutil.rmtree(scratch, ignore_errors=True)


def parts_of(sources: Path) -> list[str]:
    """The parts that the sources have beside the main library."""
    return sorted({path.parent.name for path in (sources / _PARTS).glob("*/*.cpp")})


def sources_of(sources: Path, part: str) -> list[str]:
    """The .cpp files of a part; those of the main library, if it is empty."""
    folders = [sources / _PARTS, sources / _PARTS / part] if part else [sources]
    return sorted(str(path) for folder in folders for path in folder.glob("*.cpp"))


def digest(sources: Path, *texts: str, part: str | None = None) -> str:
    """Twenty hexadecimal digits for `texts` and the files of `sources`: all, or those that a part is compiled from."""
    digest = hashlib.sha256("\0".join([*texts, platform.machine()]).encode())
    files = sources.rglob("*") if part is None else [*sources.rglob("*.h"), *map(Path, sources_of(sources, part))]
    for path in sorted(path for path in files if path.is_file()):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:20]


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _lock_if_free(path: Path) -> Iterator[bool]:
    with path.open("a") as file:
        yield _try_lock(file)
