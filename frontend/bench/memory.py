"""How much memory a server's processes hold, with pages that several of them share counted once."""

import re
from pathlib import Path
from typing import NamedTuple

import psutil

SMALLEST_CACHE_BYTES = 64 * 2**20
"""A smaller one is not told from other memory, and counts as such."""

_MAPPING = re.compile(r"^Size:\s+(\d+) kB$.*?^Pss:\s+(\d+) kB$.*?^VmFlags:(.*?)$", re.MULTILINE | re.DOTALL)


class ResidentMemory(NamedTuple):
    """Bytes of a process and all its descendants.

    Attributes:
        total: what is resident; a page shared by n processes counts 1/n in each (PSS).
        cache: the part of it that is KV cache of a CPU worker. Of a cache, only pages once written are resident.
    """

    total: int
    cache: int

    def beyond(self, weights_bytes: int) -> int:
        """What is neither weights nor cache."""
        return self.total - self.cache - weights_bytes


def resident_memory(pid: int) -> ResidentMemory:
    """Measures a process tree. A process that ends meanwhile counts nothing."""
    root = psutil.Process(pid)
    parts = [_of_process(process.pid) for process in (root, *root.children(recursive=True))]
    return ResidentMemory(sum(part.total for part in parts), sum(part.cache for part in parts))


def checkpoint_bytes(folder: Path) -> int:
    """Size of a checkpoint's weights on disk: one copy of each."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _of_process(pid: int) -> ResidentMemory:
    try:
        text = Path(f"/proc/{pid}/smaps").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ResidentMemory(0, 0)
    total = cache = 0
    for size, resident, flags in _MAPPING.findall(text):
        num_bytes = int(resident) * 1024
        total += num_bytes
        # Nothing else of ours is this large and asks for huge pages ("hg"), as numpy does for its large arrays.
        if "hg" in flags.split() and int(size) * 1024 >= SMALLEST_CACHE_BYTES:
            cache += num_bytes
    return ResidentMemory(total, cache)
