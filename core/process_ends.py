"""How a process ended: by its own fault, or by somebody outside."""

import signal
from pathlib import Path

OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""Signals that no process gets by a fault of its own. The system sends SIGKILL too, when memory runs out."""
_VMSTAT = Path("/proc/vmstat")


def count_oom_kills(vmstat: Path = _VMSTAT) -> int | None:
    """The processes that this host has killed for lack of memory, in any control group; None where it does not say."""
    try:
        lines = vmstat.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


class EndOfProcess:
    """Judges the end of a process that is about to start. Build it before that.

    Args:
        is_here: the process runs on this host.
    """

    def __init__(self, *, is_here: bool = True) -> None:
        self._oom_kills = count_oom_kills() if is_here else None

    def is_from_outside(self, code: int) -> bool:
        """True if somebody outside has ended the process, as far as can be known.

        Args:
            code: its exit code; negative: the signal that ended it.
        """
        if code == -signal.SIGKILL:
            return self._oom_kills is not None and not self._has_oom_kills
        return -code in OUTSIDE

    def hint(self, code: int) -> str:
        """What else is known of a process that a signal has ended: a sentence after a space, or nothing."""
        if code != -signal.SIGKILL:
            return ""
        if self._oom_kills is None:
            return " Perhaps the host ran out of memory: see dmesg."
        return " The host ran out of memory: see dmesg." if self._has_oom_kills else ""

    @property
    def _has_oom_kills(self) -> bool:
        return self._oom_kills is not None and count_oom_kills() != self._oom_kills
