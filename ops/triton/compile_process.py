"""A process that compiles kernels: `python -m quire.ops.triton.compile_process FOLDER`.

Jobs arrive as lines. Each is answered with a line: an empty one, or what was wrong.
"""

import importlib
import os
import sys
from pathlib import Path

from quire.ops.triton.compiling import compile_kernel
from quire.ops.triton.jobs import Job
from quire.ops.triton.kernel_function import KernelFunction


def find_kernel(module: str, name: str) -> KernelFunction:
    """The kernel of a module."""
    found = [each for each in vars(importlib.import_module(module)).values() if isinstance(each, KernelFunction)]
    return next(each for each in found if each.name == name)


def main(folder: Path) -> None:
    """Serves jobs from standard input until it ends."""
    answers, sys.stdout = sys.stdout, sys.stderr  # so that nothing that is printed counts as an answer
    for line in sys.stdin:
        job = Job.read(line)
        try:
            compile_kernel(find_kernel(job.module, job.kernel), job, folder)
            answer = ""
        except Exception as error:  # whatever the compiler raises is one kernel's, and the answer
            answer = " ".join(f"{type(error).__name__}: {error}".split())[-2000:] or type(error).__name__
        try:
            print(answer, file=answers, flush=True)
        except BrokenPipeError:  # the process that asked has ended
            break
    os._exit(0)  # Triton reports objects that it never frees, at length, when a process ends as usual


if __name__ == "__main__":
    os.nice(10)  # requests may be served meanwhile
    main(Path(sys.argv[1]))
