"""What a process of this host did lately, by the system's own figures: whether it computed, waited for a core, or for
memory that was swapped out, or was stopped. Silence means something else in each case."""

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")


def is_stopped(pid: int) -> bool:
    """True if a signal (SIGSTOP) has stopped the process. One that a debugger holds does not count."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "T"
    return False


class Activity(NamedTuple):
    """Figures of a span of time.

    Attributes:
        cpu_seconds: processor time of all threads.
        starved_seconds: the longest time that one thread was ready to run and no core was free; 0 where the system
            does not count this.
        num_major_faults: pages that had to be read from disk.
    """

    cpu_seconds: float = 0.0
    starved_seconds: float = 0.0
    num_major_faults: int = 0


class ActivityMeter:
    """Measures what a process did since the last look. Use it from one thread.

    Args:
        pid: it need not be a child; one that is gone has done nothing.
    """

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/proc/{pid}")
        self._cpu_seconds, self._num_major_faults = self._totals()
        self._delays = self._run_delays()

    def look(self) -> Activity:
        """What it did since the last call."""
        before = self._cpu_seconds, self._num_major_faults, self._delays
        self._cpu_seconds, self._num_major_faults = self._totals()
        self._delays = self._run_delays()
        waits = (seconds - before[2][thread] for thread, seconds in self._delays.items() if thread in before[2])
        return Activity(self._cpu_seconds - before[0], max(waits, default=0.0), self._num_major_faults - before[1])

    def _totals(self) -> tuple[float, int]:
        """Processor seconds and major faults of the process's life."""
        with contextlib.suppress(OSError, IndexError, ValueError):
            # The fields after the name are those of proc_pid_stat(5) from number 3 on.
            fields = (self._folder / "stat").read_text().rpartition(") ")[2].split()
            return (int(fields[11]) + int(fields[12])) / _TICKS, int(fields[9])
        return 0.0, 0

    def _run_delays(self) -> dict[str, float]:
        """Seconds that each thread has waited for a core."""
        found = {}
        with contextlib.suppress(OSError):
            for thread in os.listdir(self._folder / "task"):
                with contextlib.suppress(OSError, IndexError, ValueError):  # the thread has ended
                    text = (self._folder / "task" / thread / "schedstat").read_text()
                    found[thread] = int(text.split()[1]) / 1e9
        return found
