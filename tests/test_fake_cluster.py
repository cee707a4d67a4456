"""`scripts/fake_cluster` where it can run: two hosts that are network namespaces."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts/fake_cluster"


def can_make_hosts() -> bool:
    """Whether this user may make network namespaces, and what the script takes for it is there."""
    if os.geteuid() or not Path("/dev/net/tun").exists():
        return False
    name = f"quire-test-{os.getpid()}"
    try:
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True, timeout=60).returncode == 0
        return made and subprocess.run(["ip", "netns", "del", name], timeout=60).returncode == 0
    except FileNotFoundError:  # there is no ip
        return False


def namespaces() -> set[str]:
    return {line.split()[0] for line in subprocess.check_output(["ip", "netns", "list"], text=True).splitlines()}


@pytest.fixture
def other_cluster() -> Iterator[None]:
    """Another process of the script has the same addresses, as seen from here."""
    if not can_make_hosts():
        pytest.skip("it needs root, /dev/net/tun and network namespaces")
    name = f"quire{os.getpid()}"[:15]
    ip(f"tuntap add dev {name} mode tap")
    try:
        ip(f"addr add 10.99.0.100/24 dev {name}")
        ip(f"link set {name} up")
        yield
    finally:
        ip(f"tuntap del dev {name} mode tap")


def ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True, timeout=60)


@pytest.mark.usefixtures("other_cluster")
def test_two_stages_on_two_hosts_exchange_what_a_step_needs() -> None:
    """Hidden states of 192 numbers go to the second host, and a token comes back."""
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), "--table", "--layouts", "PP 2"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        out, errors = process.communicate(timeout=170)
    finally:
        process.terminate()  # it removes its hosts then
        process.wait(60)
    assert process.returncode == 0, errors
    *_, row = out.splitlines()
    name, hosts, num_bytes, frames, *_ = (cell.strip() for cell in row.strip("|").split("|"))
    assert (name, hosts) == ("PP 2", "2")
    assert 192 * 4 < int(num_bytes.replace(",", "")) < 10_000
    assert 2 <= int(frames) < 30
    assert not any(each.startswith(f"quire-{process.pid}-") for each in namespaces())
