"""Compiled kernels as files: KEY.cubin, or KEY.hsaco, and KEY.json, written after it. A key has one content.

They lie in a folder, or in an archive, which is a zip file of such a folder's files. An archive is only read.
"""

import functools
import json
import os
import zipfile
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


def find(place: Path, key: str) -> Binary | None:
    """The binary of a key; None if the folder or archive has none."""
    try:
        return Binary(**json.loads(_read(place, f"{key}.json")))
    except (OSError, ValueError, TypeError, KeyError, zipfile.BadZipFile):  # absent, cut off, or of other fields
        return None


def code_of(place: Path, binary: Binary) -> bytes:
    """The machine code of a binary that `find` found there."""
    return _read(place, code_path(place, binary).name)


def pack(folder: Path, binaries: Iterable[Binary], archive: Path) -> None:
    """Writes the files of these binaries from a folder into an archive."""
    scratch = archive.with_name(f"{archive.name}.{os.getpid()}")
    with zipfile.ZipFile(scratch, "w", zipfile.ZIP_DEFLATED) as packed:
        for key, path in sorted({each.key: code_path(folder, each) for each in binaries}.items()):
            packed.write(path, path.name)
            packed.write(folder / f"{key}.json", f"{key}.json")
    scratch.replace(archive)


def find_in(places: Iterable[Path], key: str) -> Binary | None:
    """The binary of a key from the first of the folders and archives that has it."""
    return next((binary for place in places if (binary := find(place, key)) is not None), None)


def code_path(folder: Path, binary: Binary) -> Path:
    """The file of machine code."""
    return folder / f"{binary.key}.{'hsaco' if binary.arch.startswith('gfx') else 'cubin'}"


def _read(place: Path, name: str) -> bytes:
    if place.suffix != ".zip":
        return (place / name).read_bytes()
    return _opened(place).read(name)


@functools.cache
def _opened(archive: Path) -> zipfile.ZipFile:
    """An archive stays open: it is read for each kernel, and no process changes it."""
    return zipfile.ZipFile(archive)


def _write(path: Path, content: bytes) -> None:
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    scratch.write_bytes(content)
    scratch.replace(path)
