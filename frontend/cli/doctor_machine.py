"""What stands out of a machine, by the facts of `quire collect-env`."""

import re
from collections.abc import Iterator, Mapping

_GIBIBYTE = 2**30
_LEAST_SHARED_GIB = 0.25
_LEAST_MEMORY_GIB = 4.0


def examine_machine(facts: Mapping[str, str]) -> Iterator[str]:
    """Indented lines: the machine in one, then a line for each thing that stands out."""
    yield "  " + "; ".join(facts.get(name, f"{name} unknown") for name in ("processor", "cores", "memory"))
    found = list(_findings(facts))
    yield from found or ["  Nothing stands out."]


def _findings(facts: Mapping[str, str]) -> Iterator[str]:
    yield from _of_packages(facts)
    yield from _of_processor(facts)
    yield from _of_memory(facts)
    yield from _of_environment(facts)


def _of_packages(facts: Mapping[str, str]) -> Iterator[str]:
    if (fault := facts.get("torch", "")).startswith(("does not import", "did not import")):
        yield f"  torch {fault}. Install it anew: pip install -U --force-reinstall torch."
    for name, version in facts.items():
        if version == "not installed" and name != "torch":
            yield f"  The package {name} is missing, which Quire needs: pip install {name}."


def _of_processor(facts: Mapping[str, str]) -> Iterator[str]:
    features = facts.get("features", "").split()
    if "x86_64" in facts.get("processor", "") and features and "avx2" not in features:
        yield "  The processor has no AVX2: the kernels are those of plain torch, which are many times slower."
    usable = re.search(r"(\d+) usable", facts.get("cores", ""))
    quota = re.match(r"(\d+) (\d+)", facts.get("cgroup cpu.max", ""))
    if usable and quota and int(quota[1]) / int(quota[2]) < int(usable[1]):
        cores = int(quota[1]) / int(quota[2])
        yield (
            f"  The container may use {cores:g} of {usable[1]} cores: more threads than that are stopped for a part of "
            "each period. Raise the quota, or give it whole cores (cpuset)."
        )
    built_for = facts.get("CUDA build", "none")
    if built_for != "none" and facts.get("GPU") == "none":
        yield (f"  torch is built for CUDA {built_for} and finds no GPU: is the driver there?")


def _of_memory(facts: Mapping[str, str]) -> Iterator[str]:
    available = _gib(facts.get("memory", ""), "available")
    if available is not None and available < _LEAST_MEMORY_GIB:
        yield f"  Only {available:g} GiB of memory are available: a billion weights in bfloat16 take 2 GiB."
    shared = facts.get("/dev/shm", "")
    free = _gib(shared, "free")
    if shared == "absent" or (free is not None and free < _LEAST_SHARED_GIB):
        yield (
            f"  /dev/shm is {'absent' if shared == 'absent' else f'down to {free:g} GiB'}: workers exchange data "
            "there. Docker takes --shm-size 1g or --ipc host."
        )
    limit = facts.get("cgroup memory.max", "")
    if limit.isdigit():
        yield f"  The container is ended when it takes more than {int(limit) / _GIBIBYTE:.1f} GiB of memory."


def _of_environment(facts: Mapping[str, str]) -> Iterator[str]:
    if facts.get("QUIRE_LOGGING_LEVEL", "").upper() == "DEBUG":
        yield "  QUIRE_LOGGING_LEVEL is DEBUG: logs have prompts, and take time."
    if disabled := facts.get("QUIRE_DISABLED_KERNELS"):
        yield f"  QUIRE_DISABLED_KERNELS is {disabled}: plain torch does their work, more slowly."
    if level := facts.get("QUIRE_CPU_ISA"):
        yield f"  QUIRE_CPU_ISA is {level}: kernels of a better level of the processor are left aside."
    usable = re.search(r"(\d+) usable", facts.get("cores", ""))
    threads = facts.get("OMP_NUM_THREADS", "")
    if usable and threads.isdigit() and int(threads) > int(usable[1]):
        yield f"  OMP_NUM_THREADS is {threads} with {usable[1]} usable cores: threads wait for one another."


def _gib(text: str, what: str) -> float | None:
    found = re.search(rf"([\d.]+) GiB {what}", text)
    return float(found[1]) if found else None
