"""A host: a network namespace with an address, and the `quire serve` that runs in it."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

from fake_hosts.switch import Switch

_CLONE_NEWNET = 0x40000000  # unshare(2)

SECRET = "the token of a fake cluster, " + "x" * 8


class Host:
    """One host.

    Args:
        switch: gets a port for it.
        folder: for its log.
    """

    def __init__(self, switch: Switch, number: int, folder: Path) -> None:
        self.name = f"quire-{os.getpid()}-{number}"
        self.address = f"10.99.0.{number + 1}"
        self.process: subprocess.Popen[bytes] | None = None
        self._log = folder / f"host-{number}.log"
        self._log.touch()
        interface = f"q{os.getpid()}n{number}"[:15]
        self.port = switch.add(interface)
        sh(f"ip netns add {self.name}")
        try:
            sh(f"ip link set {interface} netns {self.name} mtu 9000")
            sh(f"ip -n {self.name} addr add {self.address}/24 dev {interface}")
            sh(f"ip -n {self.name} link set {interface} up")
            sh(f"ip -n {self.name} link set lo up")
        except BaseException:  # also if this process is told to stop
            self.remove()
            raise

    def start(self, *arguments: str, secret: str = SECRET) -> None:
        """Starts `quire serve ARGUMENTS`."""
        environment = {
            **os.environ, "QUIRE_JOIN_TOKEN": secret, "QUIRE_HOST_IP": self.address, "OMP_NUM_THREADS": "1",
            "QUIRE_CPU_KVCACHE_SPACE": "0.1",
        }  # fmt: skip
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", self.name, sys.executable, "-m", "quire", "serve", *arguments],
                env=environment, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def send(self, number: int) -> None:
        """Sends the process a signal."""
        assert self.process is not None
        self.process.send_signal(number)

    def end(self, number: int = signal.SIGTERM) -> int | None:
        """Ends the process, if one runs, and returns its exit code."""
        if self.process is None:
            return None
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
            self.process.send_signal(number)
        code, self.process = self.process.wait(60), None
        return code

    def log(self) -> str:
        """The output of its processes."""
        return self._log.read_text(errors="replace")

    def listeners(self) -> list[tuple[str, int]]:
        """Addresses and ports at which anything listens here."""
        rows = sh(f"ip netns exec {self.name} ss -ltnH").splitlines()
        return [(address, int(port)) for address, _, port in (row.split()[3].rpartition(":") for row in rows)]

    def remove(self) -> None:
        """Ends what runs here, and removes the namespace."""
        self.end(signal.SIGKILL)
        sh(f"ip netns del {self.name}")


def leave_network() -> None:
    """Moves this process to a new network namespace, before it has threads: others have hosts at the same addresses."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "a network namespace cannot be made")


def sh(command: str) -> str:
    """The output of a command without quotes in it."""
    return subprocess.run(command.split(), check=True, capture_output=True, text=True).stdout
