"""Counts the processor cores to compute on. Must not import torch, which reads OMP_NUM_THREADS at its import."""

import os
from pathlib import Path


def usable_cores() -> int:
    """Counts physical cores within this process's CPU affinity, or its control group's quota (v2) if that is less.

    Two hardware threads of one core count once: matrix kernels that share a core's vector units gain nothing.
    """
    cores = len({_siblings(cpu) for cpu in os.sched_getaffinity(0)})
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def share_out_cores(environment: dict[str, str] | os._Environ[str], num_workers: int) -> None:
    """Sets OMP_NUM_THREADS, unless the user has, so that all workers together have one thread a core.

    Also makes waiting threads of torch's own operations sleep after some microseconds of spinning. libgomp's default is
    about a hundred times longer, and on a busy machine takes the core from the thread that they wait for.
    """
    environment.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // num_workers)))
    environment.setdefault("GOMP_SPINCOUNT", "1000")


def _siblings(cpu: int) -> str:
    """Returns the hardware threads of the core of `cpu`; only `cpu` if the kernel does not list them."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(cpu)
