"""Facts that nodes exchange about themselves, and the differences that keep a node out."""

import hashlib
import json
import os
import socket
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from msgspec import Struct

from quire.core import checkpoint_file
from quire.core.errors import ConfigError

CLOCKS_APART_SECONDS = 5.0
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.quire")
_HEAD_BYTES = 1 << 20
_PACKAGES = ("torch", "transformers", "xgrammar", "llguidance", "outlines-core", "lm-format-enforcer")
"""Packages on which the workers' results or masks depend."""
_SOURCES, _SOURCE_ENDINGS = ("core", "executor", "frontend", "ops"), (".py", ".cpp", ".h")
_DIGITS = 12  # hexadecimal ones, of a digest that people compare


Division = Literal["workers", "engines", "servers"]
"""The unit that is divided over the nodes: workers of one engine, whole engines, or engines with their servers."""
_FLAGS: dict[Division, tuple[str, str]] = {
    "workers": ("--nnodes", "--node-rank"),
    "engines": ("--data-parallel-size", "--data-parallel-start-rank"),
    "servers": ("--data-parallel-size", "--data-parallel-rank or --data-parallel-start-rank"),
}
"""The flags for the number of ranks, and for a node's own rank."""
ADDRESS_FLAGS: dict[Division, tuple[str, str]] = {
    "workers": ("--master-addr", "--master-port"),
    "engines": ("--data-parallel-address (else --master-addr)", "--data-parallel-rpc-port (else --master-port)"),
    "servers": ("--data-parallel-address (else --master-addr)", "--data-parallel-rpc-port (else --master-port)"),
}
"""Where node 0 listens for the others. The first of two flags counts, if it is given."""
_NAMES: dict[Division, str] = {
    "workers": "node",
    "engines": "the node with engine",
    "servers": "the server with engine",
}


class NodeFacts(Struct, array_like=True, frozen=True):
    """Facts about one node, as it was started."""

    division: Division
    ranks: list[int]  # the numbers that the node has: its own, or those of its engines
    num_ranks: int  # in the whole cluster
    address: str  # for other nodes
    hostname: str
    quire: str  # version, and after a + the digest of its files
    packages: dict[str, str]  # versions by name, of those that are installed
    digest: str  # of the checkpoint; see `digest_of`
    settings: dict[str, str] = {}  # by flag: what node 0 does not decide, and must have with the same value

    @classmethod
    def of_this_host(
        cls,
        division: Division,
        ranks: list[int],
        num_ranks: int,
        address: str,
        folder: Path | None,
        settings: dict[str, str] | None = None,
    ) -> "NodeFacts":
        """The facts of this host, with the checkpoint in `folder`; the digest is empty without one."""
        return cls(
            division=division,
            ranks=ranks,
            num_ranks=num_ranks,
            address=address,
            hostname=socket.gethostname(),
            quire=f"{_version('quire') or 'none'}+{digest_of_sources()[:_DIGITS]}",
            packages={name: found for name in _PACKAGES if (found := _version(name)) is not None},
            digest="" if folder is None else digest_of(folder),
            settings=settings or {},
        )

    def __str__(self) -> str:
        """For logs."""
        return f"{_NAMES[self.division]} {name_ranks(self.ranks)} ({self.hostname}, {self.address})"


def name_ranks(ranks: Sequence[int]) -> str:
    """For logs: 1, 2, 3."""
    return ", ".join(map(str, ranks))


def obstacle(head: NodeFacts, node: NodeFacts, seconds_apart: float) -> str | None:
    """The reason why `node` cannot work with node 0, as a sentence for both sides; None if it can.

    Args:
        seconds_apart: by how much the node's clock is ahead of node 0's.
    """
    size, number = _FLAGS[head.division]
    if node.division != head.division:
        return (
            f"It was started for {node.division}, and node 0 for {head.division}: give it {size} and {number}, as node "
            "0 has."
        )
    if node.num_ranks != head.num_ranks:
        return f"It was started with {size} {node.num_ranks}, and node 0 with {head.num_ranks}; use one number."
    has_one = len(node.ranks) == 1 or (head.division != "workers" and len(node.ranks) > 1)
    if not has_one or not all(0 <= rank < head.num_ranks and rank not in head.ranks for rank in node.ranks):
        numbers = name_ranks(node.ranks) or "none"
        return f"Its {number} gives it number {numbers}, which node 0 has or nobody can have."
    if node.quire != head.quire:
        return (
            f"It runs Quire {node.quire}, and node 0 Quire {head.quire} (after the + is a digest of Quire's files); "
            "install one version on all nodes."
        )
    for name, ours in head.packages.items():
        if (theirs := node.packages.get(name)) != ours:
            has = f"no {name}" if theirs is None else f"{name} {theirs}"
            return f"It runs {has}, and node 0 {name} {ours}; install one version on all nodes."
    if node.digest != head.digest:
        return "Its checkpoint has other settings or weights than node 0's; copy the same files to all nodes."
    for flag, value in head.settings.items():
        if (theirs := node.settings.get(flag, "")) != value:
            return f"It was started with {flag} {theirs}, and node 0 with {flag} {value}; use one value on all."
    if abs(seconds_apart) > CLOCKS_APART_SECONDS:
        return f"Its clock is {seconds_apart:+.0f} s from node 0's; synchronize the clocks (NTP)."
    return None


def digest_of(folder: Path) -> str:
    """SHA-256 over config.json and, of each file with weights, name, size and header.

    It takes milliseconds, because it does not read the weights themselves.
    """
    digest = hashlib.sha256()
    config = folder / "config.json"
    if config.is_file():
        # By content: another program may have written the same settings with other spaces.
        digest.update(json.dumps(checkpoint_file.read_json(config), sort_keys=True).encode())
    for path in sorted({path for pattern in _WEIGHT_FILES for path in folder.glob(pattern)}):
        with path.open("rb") as file:
            head = file.read(8)
            length = int.from_bytes(head, "little") if path.suffix == ".safetensors" else _HEAD_BYTES
            digest.update(f"{path.name} {path.stat().st_size} ".encode() + head + file.read(min(length, 64 << 20)))
    return digest.hexdigest()


def digest_of_sources() -> str:
    """SHA-256 over the names and contents of the source files that nodes run: their messages and the workers'
    computations depend on them. Two commits may have one version and differ in these.

    Raises:
        ConfigError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for package in _SOURCES:
        spec = find_spec(f"quire.{package}")
        assert spec is not None
        for root in spec.submodule_search_locations or ():
            found = [
                os.path.join(folder, name)
                for folder, _, names in os.walk(root)
                for name in names
                if name.endswith(_SOURCE_ENDINGS) and not name.startswith(".")  # as an editor's lock is named
            ]
            for path in sorted(found):
                try:
                    with open(path, "rb", buffering=0) as file:  # hundreds of files: a start should not wait for them
                        content = file.read()
                except OSError as error:
                    raise ConfigError(
                        f"{path} of Quire cannot be read: {error.strerror}. Make it readable or remove it, or install "
                        "Quire again; nodes compare their files."
                    ) from None
                digest.update(f"{package}{path[len(root) :]} {len(content)} ".encode() + content)
    return digest.hexdigest()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
