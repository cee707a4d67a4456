"""Compiled kernels as files: KEY.cubin, or KEY.hsaco, and KEY.json, written after it. A key has one content."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class Binary(NamedTuple):
    """A compiled kernel.

    Attributes:
        key: name of its files.
        kernel: the kernel's name.
        specialization: what it is compiled for, to be read by people.
        arch: name of the card.
        triton: version of the compiler.
        entry: name of the function in the binary.
        shared_bytes: dynamic shared memory of a program.
        num_warps: warps of a program.
        num_hidden: pointers that the compiler added behind the kernel's parameters: to scratch memory, then to that
            of a profiler.
        scratch_bytes: scratch memory that each program needs.
        scratch_alignment: of that memory.
        profile_bytes: memory for a profiler that each program needs.
        waits: its programs wait for the kernels before it, so it may start before their end (`chain.py`).
    """

    key: str
    kernel: str
    specialization: str
    arch: str
    triton: str
    entry: str
    shared_bytes: int
    num_warps: int
    num_hidden: int
    scratch_bytes: int
    scratch_alignment: int
    profile_bytes: int
    waits: bool


def store(folder: Path, binary: Binary, code: bytes) -> None:
    """Writes a binary's files."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _write(code_path(folder, binary), code)
    _write(folder / f"{binary.key}.json", json.dumps(binary._asdict()).encode())


def find(folder: Path, key: str) -> Binary | None:
    """The binary of a key; None if the folder has none."""
    try:
        return Binary(**json.loads((folder / f"{key}.json").read_text()))
    except (OSError, ValueError, TypeError):  # absent, cut off, or of other fields
        return None


def find_in(folders: Iterable[Path], key: str) -> Binary | None:
    """The binary of a key from the first of the folders that has it."""
    return next((binary for folder in folders if (binary := find(folder, key)) is not None), None)


def code_path(folder: Path, binary: Binary) -> Path:
    """The file of machine code."""
    return folder / f"{binary.key}.{'hsaco' if binary.arch.startswith('gfx') else 'cubin'}"


def _write(path: Path, content: bytes) -> None:
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    scratch.write_bytes(content)
    scratch.replace(path)
