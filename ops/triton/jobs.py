"""What is to be compiled, the key that its result has, and the folders where results are found."""

import hashlib
import importlib
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import triton
import triton.language as tl

from quire.ops.cache_root import cache_root
from quire.ops.triton.kernel_function import KernelFunction
from quire.ops.triton.sources import source_of
from quire.ops.triton.specialization import Specialization

_COMPILING = Path(__file__).with_name("compiling.py")


class Job(NamedTuple):
    """A kernel to compile; what is made is stored under `key`."""

    module: str
    kernel: str
    specialization: Specialization
    arch: str
    key: str

    def line(self) -> str:
        """The job as one line of text."""
        constants = tuple((name, _written(value)) for name, value in self.specialization.constants)
        return json.dumps([*self[:2], self.specialization._replace(constants=constants), *self[3:]])

    @classmethod
    def read(cls, line: str) -> "Job":
        """The job of a line."""
        module, kernel, (types, constants, unaligned, num_warps, num_stages), arch, key = json.loads(line)
        values = tuple((name, _read(value)) for name, value in constants)
        return cls(
            module, kernel, Specialization(tuple(types), values, tuple(unaligned), num_warps, num_stages), arch, key
        )


def _written(value: object) -> object:
    if isinstance(value, tl.dtype):
        return {"dtype": value.name}
    if hasattr(value, "fn"):
        return {"function": [value.fn.__module__, value.fn.__qualname__]}
    return value


def _read(value: Any) -> object:
    if isinstance(value, dict) and "dtype" in value:
        return tl.dtype(value["dtype"])
    if isinstance(value, dict):
        module, name = value["function"]
        return vars(importlib.import_module(module))[name]
    return value


def job_of(kernel: KernelFunction, specialization: Specialization, arch: str) -> Job:
    """The job that compiles a kernel for a card; its key is a hash of everything that the result depends on."""
    circumstances = (triton.__version__, os.environ.get("TRITON_PTXAS_PATH", ""), arch, repr(specialization))
    functions = [value for _, value in specialization.constants if hasattr(value, "fn")]
    sources = (_COMPILING.read_text(), *(source_of(each) for each in (kernel.function, *functions)))
    key = hashlib.sha256("\0".join((*circumstances, *sources)).encode()).hexdigest()[:32]
    return Job(kernel.module, kernel.name, specialization, arch, key)


def cache_folder() -> Path:
    """The folder of kernels that were compiled on this machine."""
    return cache_root() / "triton_kernels"


def shipped_archive() -> Path:
    """The archive of kernels that an installed wheel may bring."""
    return Path(__file__).with_name("compiled.zip")
