"""The resident memory of a server's processes; memory that several processes share counts once."""

import re
from pathlib import Path
from typing import NamedTuple

import psutil

SMALLEST_CACHE_BYTES = 64 * 2**20
"""A smaller KV cache cannot be distinguished from other memory, and is counted as such."""

_MAPPING = re.compile(r"(\S*)\nSize:\s+(\d+) kB$.*?^Pss:\s+(\d+) kB$.*?^VmFlags:(.*?)$", re.MULTILINE | re.DOTALL)
"""(the end of the mapped file's name, its size, its resident part, its flags)"""


class ResidentMemory(NamedTuple):
    """Resident bytes of a process and all its descendants.

    Attributes:
        total: all resident memory; memory shared by n processes counts 1/n in each (PSS).
        cache: the KV cache of a CPU worker, as far as it has been written: only written memory is resident.
        mapped: weights that were packed before, as far as they have been read: they are mapped from their files.
    """

    total: int
    cache: int
    mapped: int = 0

    def beyond(self, weights_bytes: int) -> int:
        """Bytes besides weights and cache."""
        return self.total - self.cache - weights_bytes


def resident_memory(pid: int) -> ResidentMemory:
    """Measures a process tree. A process that ends meanwhile counts as 0."""
    root = psutil.Process(pid)
    parts = [_of_process(process.pid) for process in (root, *root.children(recursive=True))]
    return ResidentMemory(*(sum(each) for each in zip(*parts, strict=True)))


def processor_seconds(pid: int) -> float:
    """Processor time of a process and all its descendants so far. Other work on the machine hardly changes it."""
    root = psutil.Process(pid)
    times = [process.cpu_times() for process in (root, *root.children(recursive=True))]
    return sum(time.user + time.system for time in times)


def checkpoint_bytes(folder: Path) -> int:
    """Size of a checkpoint's weights on disk."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _of_process(pid: int) -> ResidentMemory:
    try:
        text = Path(f"/proc/{pid}/smaps").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ResidentMemory(0, 0)
    total = cache = mapped = 0
    for name, size, resident, flags in _MAPPING.findall(text):
        num_bytes = int(resident) * 1024
        total += num_bytes
        # NumPy asks for huge pages ("hg") for large arrays, and no other array of ours is as large as a KV cache.
        if "hg" in flags.split() and int(size) * 1024 >= SMALLEST_CACHE_BYTES:
            cache += num_bytes
        if name.endswith(".safetensors"):
            mapped += num_bytes
    return ResidentMemory(total, cache, mapped)
