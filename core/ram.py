"""The RAM that this host has available."""

from pathlib import Path

import psutil


def available_ram(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of RAM available without swapping: the machine's, or the control group's (v2 or v1) if that is less."""
    available = psutil.virtual_memory().available
    for limit, usage in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            most, used = int((cgroup / limit).read_text()), int((cgroup / usage).read_text())
        except (OSError, ValueError):  # no such control group, or its limit is "max"
            continue
        available = min(available, max(0, most - used + _reclaimable(cgroup / limit)))
    return available


def _reclaimable(limit_file: Path) -> int:
    """Bytes of page cache that count as used by the control group, though the kernel gives them up on demand."""
    try:
        lines = (limit_file.parent / "memory.stat").read_text().split("\n")
    except OSError:
        return 0
    values = dict(line.split(" ", 1) for line in lines if " " in line)
    return int(values.get("inactive_file", values.get("total_inactive_file", 0)))
