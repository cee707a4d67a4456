"""The processor time that each process of the benchmark has used."""

import os

import psutil

# Roles by the module on the command line.
_ROLES = {
    "quire.frontend.bench.host.null_server": "frontend",
    "quire.frontend.launch.engine_main": "engine",
    "quire.executor.processes.worker_process": "worker",
}


class CpuClock:
    """Reads the processor time of this process and its descendants, by role.

    Args:
        own_role: the role of this process: "client" of a server, or the "frontend" itself.
    """

    def __init__(self, own_role: str) -> None:
        self._processes = [(own_role, psutil.Process(os.getpid()))]
        for child in psutil.Process().children(recursive=True):
            role = next((role for module, role in _ROLES.items() if module in child.cmdline()), "other")
            self._processes.append((role, child))

    def read(self) -> dict[str, float]:
        """Seconds in user and system mode, by role."""
        seconds: dict[str, float] = {}
        for role, process in self._processes:
            times = process.cpu_times()
            seconds[role] = seconds.get(role, 0.0) + times.user + times.system
        return seconds
