"""The program that compiles and links the kernels; `builds.py` starts it.

It is a process of its own, so that a slow build outlives the worker that asked for it. Run by its path, it loads the
standard library alone, and never torch. It leaves either the library or a text that says why there is none, whole from
its first moment. A build that something from outside ended leaves neither, and is tried again.
"""

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


@dataclass(frozen=True)
class Job:
    """What to build. Paths are strings, because it travels as JSON."""

    command: list[str]
    """The compiler and its flags."""
    sources: str
    """Folder of the .cpp files."""
    scratch: str
    """Folder for what is made on the way; this program makes it and removes it."""
    library: str
    refusal: str
    """File for the reason, in its first line, and the compiler's whole output, if there will be no library."""
    max_seconds: float
    """A build that takes longer is given up, and counts as refused."""


class Refused(Exception):
    """The compiler does not take these sources; the first line of the text is the reason."""


class Interrupted(Exception):
    """Something from outside ended the compiler: nothing is known about the sources."""


def main() -> None:
    """Builds the job that the first argument holds as JSON. The last line of stderr says what went wrong, if it did."""
    job = Job(**json.loads(sys.argv[1]))
    scratch = Path(job.scratch)
    shutil.rmtree(scratch, ignore_errors=True)  # of a build of the same that was killed
    scratch.mkdir()
    try:
        os.replace(_build(job, scratch), job.library)
    except Refused as reason:
        text = scratch / "refusal"
        text.write_text(f"{reason}\n")
        os.replace(text, job.refusal)
    except Interrupted as reason:
        sys.exit(str(reason))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if Path(job.refusal).exists():
        # Children of a compiler that was given up may be at work still. This ends them, and this process with them.
        os.killpg(0, signal.SIGKILL)


def _build(job: Job, scratch: Path) -> Path:
    deadline = time.monotonic() + job.max_seconds

    def run(command: list[str]) -> None:
        _run(command, scratch, deadline, job.max_seconds)

    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        sources = sorted(Path(job.sources).glob("*.cpp"))
        list(pool.map(run, [[*job.command, "-c", str(path)] for path in sources]))
    finally:
        pool.shutdown(cancel_futures=True)
    objects = sorted(path.name for path in scratch.glob("*.o"))
    run([*job.command, "-shared", "-o", "kernels.so", *objects])
    return scratch / "kernels.so"


def _run(command: list[str], folder: Path, deadline: float, max_seconds: float) -> None:
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "LC_ALL": "C"},  # messages in the language that is searched for "error"
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=max(0.0, deadline - time.monotonic()),
        )
    except subprocess.TimeoutExpired:
        raise Refused(f"{command[0]} took longer than {max_seconds:.0f} s") from None
    if done.returncode < 0:
        raise Interrupted(f"{command[0]} was ended by signal {-done.returncode}")
    if done.returncode:
        lines = done.stderr.splitlines()
        telling = [line for line in lines if "error:" in line or "undefined reference" in line] or lines
        reason = telling[0] if telling else f"exit status {done.returncode}"
        raise Refused(f"{command[0]} failed: {reason}\n{done.stderr}")


if __name__ == "__main__":
    main()
