"""The program that compiles and links the kernels; `builds.py` starts it.

It is a separate process, so that a slow build outlives the worker that started it. It is run by its path and imports
only the standard library, never torch. It leaves either the library or a refusal, a file with the reason why there is
no library; both appear complete (by rename). A build that a signal ended leaves neither, and is tried again.
"""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

PRECOMPILED = "precompiled.h"
"""A header that is precompiled, if the sources have it, and included before each source."""

_WORTH_PRECOMPILING = 3
"""Sources from which on precompiling the header saves time."""

_FULL_DISK = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
"""The words of compilers and linkers for it, in English."""

LINKING = ("-shared", *(("-Wl,-z,defs",) if sys.platform == "linux" else ()))
"""Makes the linker report missing functions, which an ELF linker otherwise leaves to the loader."""


@dataclass(frozen=True)
class Job:
    """One build. Paths are strings, because a job is passed as JSON."""

    command: list[str]
    """The compiler and its flags."""
    headers: str
    """Folder of the headers."""
    sources: list[str]
    """The .cpp files."""
    scratch: str
    """A folder for object files, which this program creates and removes."""
    library: str
    max_seconds: float
    """A build that takes longer is ended, and counts as refused."""


class CompilerError(Exception):
    """The compiler refuses these sources; the first line of the text is the reason."""


class Interrupted(Exception):
    """A signal ended the compiler, or the disk took no more of what it writes, so the sources may be valid."""


def main() -> None:
    """Builds the job in the first argument (JSON). If that is interrupted, the last line of stderr is the reason.

    The second argument is the path of a refusal: the reason in its first line, then the compiler's whole output.
    """
    job, refusal = Job(**json.loads(sys.argv[1])), sys.argv[2]
    try:
        build(job)
    except CompilerError as reason:
        text = Path(f"{refusal}.new")
        text.write_text(f"{reason}\n")
        os.replace(text, refusal)
    except Interrupted as reason:
        sys.exit(str(reason))
    if Path(refusal).exists():
        # Children of a compiler that timed out may still run. This ends them, and this process, too.
        os.killpg(0, signal.SIGKILL)


def build(job: Job) -> None:
    """Makes the library.

    Raises:
        CompilerError: the compiler fails, or takes too long.
        Interrupted: a signal ended it, or the disk is full.
    """
    scratch = Path(job.scratch)
    shutil.rmtree(scratch, ignore_errors=True)  # left by a build of this job that was killed
    scratch.mkdir()
    try:
        os.replace(_link(job, scratch), job.library)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _link(job: Job, scratch: Path) -> Path:
    deadline = time.monotonic() + job.max_seconds

    def run(command: list[str]) -> None:
        _run(command, scratch, deadline, job.max_seconds)

    command = [*job.command, f"-I{job.headers}"]
    header = Path(job.headers, PRECOMPILED)
    if header.exists() and len(job.sources) >= _WORTH_PRECOMPILING:
        run([*command, "-c", "-x", "c++-header", str(header), "-o", f"{PRECOMPILED}.gch"])
        command += [
            "-include",
            PRECOMPILED,
        ]  # the precompiled header in the scratch folder, or its text for a compiler that rejects it
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        list(pool.map(run, [[*command, "-c", path] for path in job.sources]))
    finally:
        pool.shutdown(cancel_futures=True)
    objects = sorted(path.name for path in scratch.glob("*.o"))
    run([*job.command, *LINKING, "-o", "kernels.so", *objects])
    return scratch / "kernels.so"


def _run(command: list[str], folder: Path, deadline: float, max_seconds: float) -> None:
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "LC_ALL": "C"},  # English messages, which are searched for "error:" below
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=max(0.0, deadline - time.monotonic()),
        )
    except subprocess.TimeoutExpired:
        raise CompilerError(f"{command[0]} took longer than {max_seconds:.0f} s") from None
    if done.returncode < 0:
        raise Interrupted(f"{command[0]} was ended by signal {-done.returncode}")
    if done.returncode:
        lines = done.stderr.splitlines()
        full = next((line for line in lines if any(each in line for each in _FULL_DISK)), None)
        if full is not None:
            raise Interrupted(f"{command[0]} failed: {full}")
        telling = [line for line in lines if "error:" in line or "undefined reference" in line] or lines
        reason = telling[0] if telling else f"exit status {done.returncode}"
        raise CompilerError(f"{command[0]} failed: {reason}\n{done.stderr}")


if __name__ == "__main__":
    main()
