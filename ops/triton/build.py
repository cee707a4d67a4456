"""Compiles variants of kernels without a device, in parallel processes, into a folder whose keys are contents.

`python -m quire.ops.triton.build [--arch sm_90] [--folder FOLDER]` compiles every variant ahead, for the cards named.
With `--archive ops/triton/compiled.zip`, a wheel that is built afterwards brings them.
"""

import argparse
import fcntl
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from quire.ops.triton.arch import ARCHES, arch_of, fitting_stages
from quire.ops.triton.binaries import Binary, find_in, pack
from quire.ops.triton.jobs import Job, cache_folder, job_of
from quire.ops.triton.variants import Variant, all_variants


class VariantError(Exception):
    """A variant cannot be compiled; the text has the compiler's reason."""


def build(
    variants: Sequence[Variant],
    arch: str,
    folder: Path,
    num_processes: int | None = None,
    *,
    known: Sequence[Path] = (),
) -> list[Binary | VariantError]:
    """Compiles what neither `folder` nor the `known` ones have; returns each variant's binary, or why there is none.

    Args:
        variants: what to compile.
        arch: name of the card, as `sm_90`.
        folder: of the binaries; what other processes put there meanwhile is as good.
        num_processes: compilers at a time; None: one for each processor that this process may use.
    """
    jobs = [job_of(each.kernel, each.specialization, arch) for each in variants]
    folders = (folder, *known)
    faults: dict[str, str] = {}
    if any(find_in(folders, job.key) is None for job in jobs):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (folder / "build.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process may compile the same ones
            missing = {job.key: job for job in jobs if find_in(folders, job.key) is None}
            faults = _compile(missing.values(), folder, num_processes or len(os.sched_getaffinity(0)))
    found = [find_in(folders, job.key) for job in jobs]
    return [
        binary or VariantError(f"{job.kernel}: {faults.get(job.key, 'lost')}")
        for binary, job in zip(found, jobs, strict=True)
    ]


def build_fitting(
    variants: Sequence[Variant],
    arch: str,
    folder: Path,
    num_processes: int | None = None,
    *,
    known: Sequence[Path] = (),
) -> tuple[list[Binary | VariantError], list[Binary]]:
    """Like `build`, for forms that fit into the card's shared memory, if need be with fewer stages.

    Returns also all that was compiled on the way: by the deeper forms, a launcher finds those that fit.
    """
    limit = arch_of(arch).max_shared_bytes
    found: dict[int, Binary | VariantError] = {}
    waiting, made = dict(enumerate(variants)), []
    while waiting:
        built = build(list(waiting.values()), arch, folder, num_processes, known=known)
        compiled, waiting = list(zip(waiting.items(), built, strict=True)), {}
        for (number, variant), binary in compiled:
            found[number] = binary
            if isinstance(binary, Binary):
                made.append(binary)
                stages = fitting_stages(variant.num_stages, binary.shared_bytes, limit)
                if stages < variant.num_stages:
                    waiting[number] = variant._replace(num_stages=stages)
    return [found[number] for number in range(len(variants))], made


def _compile(jobs: Iterable[Job], folder: Path, num_processes: int) -> dict[str, str]:
    """Compiles jobs in child processes; returns faults by key."""
    waiting = deque(jobs)
    faults: dict[str, str] = {}
    lock = threading.Lock()

    def serve(_: int) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(each for each in sys.path if each)}
        environment.pop("TRITON_INTERPRET", None)
        command = [sys.executable, "-m", "quire.ops.triton.compile_process", str(folder)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(command, **pipes, text=True, env=environment) as child:  # type: ignore[call-overload]
            while True:
                with lock:
                    job = waiting.popleft() if waiting else None
                if job is None:
                    break
                child.stdin.write(f"{job.line()}\n")
                child.stdin.flush()
                answer = child.stdout.readline()
                if fault := answer.strip() or ("" if answer else "the compiler's process ended"):
                    faults[job.key] = fault
                if not answer:
                    break
            child.stdin.close()

    num_children = min(num_processes, len(waiting))
    if num_children:
        with ThreadPoolExecutor(num_children) as threads:
            list(threads.map(serve, range(num_children)))
    faults.update({job.key: "the compiler's process ended" for job in waiting})
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", choices=ARCHES, action="append", help="default: sm_90; may be repeated")
    parser.add_argument("--folder", type=Path, default=cache_folder(), help="default: %(default)s")
    parser.add_argument("--processes", type=int, help="default: one for each processor")
    parser.add_argument("--archive", type=Path, help="also write the kernels into this zip file")
    arguments = parser.parse_args()
    variants = all_variants()
    made: list[Binary] = []
    for arch in arguments.arch or ["sm_90"]:
        built, compiled = build_fitting(variants, arch, arguments.folder, arguments.processes)
        faults = [each for each in built if isinstance(each, VariantError)]
        made += compiled
        print(f"{arch}: {len(built) - len(faults)} of {len(built)} kernels in {arguments.folder}")
        for fault in faults:
            print(f"  {fault}")
    if arguments.archive is not None:
        pack(arguments.folder, made, arguments.archive)
        print(f"{arguments.archive}: {arguments.archive.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
