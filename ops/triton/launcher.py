"""Launches kernels that were compiled ahead.

The buffer of a kernel's arguments is laid out once, and rewritten at each launch.
"""

import atexit
import ctypes
import logging
import math
import os
import shutil
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.ops.triton.arch import arch_of, fitting_stages
from quire.ops.triton.binaries import Binary, code_of, find
from quire.ops.triton.compiling import compile_kernel
from quire.ops.triton.driver import Driver, DriverError, LaunchConfig, early_start, is_context_missing
from quire.ops.triton.jobs import Job, cache_folder, job_of, shipped_archive
from quire.ops.triton.kernel_function import KernelFunction, is_pointer
from quire.ops.triton.specialization import ALIGNMENT, CONSTANT, POINTER_TYPES, SCALARS, Specialization
from quire.ops.triton.variants import is_listed

logger = logging.getLogger(__name__)

_SLOT = {"i": "i4x", "I": "I4x", "f": "f4x"}
"""Each argument has 8 bytes of the buffer."""
_IN_MEMORY = "quire-kernels-"
_LONG = "long"
"""Stands for the type of an integer that needs 64 bits."""

Compile = Callable[[KernelFunction, Job, Path], Binary]


class Launcher:
    """Launches kernels of one kind of card.

    A kernel is found in `folders`, which may be archives, in their order. One that is in none is compiled into the
    last: at the first start with a new version, or where a form is asked for that no list of variants has. The log
    says so.

    Attributes:
        num_compiled: kernels that were compiled at their first launch. It stays as it is while requests run.
    """

    def __init__(
        self,
        driver: Driver,
        arch: str,
        folders: Sequence[Path],
        place: Callable[[], tuple[int, int]],
        compile_one: Compile = compile_kernel,
    ) -> None:
        """`place` returns the current device's index and the handle of its current stream."""
        self.num_compiled = 0
        self._driver = driver
        self._arch = arch
        self._folders = folders
        self._place = place
        self._compile = compile_one
        self._loaded: dict[tuple[Any, ...], LoadedKernel] = {}
        self._lock = threading.Lock()

    @classmethod
    def of_this_card(cls) -> "Launcher":
        """The launcher for torch's current device."""
        major, minor = torch.cuda.get_device_capability()
        return cls(Driver(), f"sm_{major}{minor}", (shipped_archive(), _writable(cache_folder())), _current_stream)

    def launch(
        self,
        kernel: KernelFunction,
        grid: tuple[int, ...],
        arguments: Sequence[Any],
        num_warps: int,
        num_stages: int,
        constants: Mapping[str, Any],
    ) -> None:
        """Launches `kernel` on the current stream, unless the grid is empty.

        Raises:
            TypeError: the arguments are not the kernel's, or of a type that none can have.
            DriverError: the driver refuses the kernel.
        """
        if len(arguments) != len(kernel.arguments):
            arguments, constants = _in_order(kernel, arguments, constants)
        types, values = _read_arguments(arguments)
        device, stream = self._place()
        key = (kernel, device, types, num_warps, num_stages, *constants.items())
        loaded = self._loaded.get(key)
        if loaded is None:
            loaded = self._load(key, kernel, device, types, num_warps, num_stages, constants)
        loaded.launch((*grid, 1, 1)[:3], values, device, stream)

    def _load(
        self,
        key: tuple[Any, ...],
        kernel: KernelFunction,
        device: int,
        types: tuple[Any, ...],
        num_warps: int,
        num_stages: int,
        constants: Mapping[str, Any],
    ) -> "LoadedKernel":
        with self._lock:
            if key not in self._loaded:
                specialization = specialize(kernel, types, constants, num_warps, num_stages)
                binary, code = self._binary(kernel, specialization)
                try:
                    function = self._driver.load(code, binary.entry, binary.shared_bytes, device)
                except DriverError as error:
                    raise DriverError(f"kernel {kernel.name}{specialization} on {self._arch}: {error}") from None
                self._loaded[key] = LoadedKernel(self._driver, function, binary, specialization)
            return self._loaded[key]

    def _binary(self, kernel: KernelFunction, specialization: Specialization) -> tuple[Binary, bytes]:
        """A form of the kernel that fits into the card's shared memory, if need be with fewer stages."""
        limit = arch_of(self._arch).max_shared_bytes
        while True:
            binary, folder = self._find(kernel, specialization)
            stages = fitting_stages(specialization.num_stages, binary.shared_bytes, limit)
            if stages == specialization.num_stages:
                return binary, code_of(folder, binary)
            specialization = specialization._replace(num_stages=stages)

    def _find(self, kernel: KernelFunction, specialization: Specialization) -> tuple[Binary, Path]:
        """A compiled form of the kernel, and the folder that has it."""
        job = job_of(kernel, specialization, self._arch)
        for folder in self._folders:
            binary = find(folder, job.key)
            if binary is not None:
                return binary, folder
        started = time.monotonic()
        try:
            binary = self._compile(kernel, job, self._folders[-1])
        except OSError as error:
            self._folders = (*self._folders, _in_memory(error))
            binary = self._compile(kernel, job, self._folders[-1])
        self.num_compiled += 1
        seconds = time.monotonic() - started
        if is_listed(kernel, specialization, or_shallower=True):
            logger.info("compiled the kernel %s%s in %.1f s, once", kernel.name, specialization, seconds)
        else:
            logger.warning(
                "compiled the kernel %s%s in %.1f s: it is in no list of variants, so requests may have waited for it; "
                "the next start will find it",
                *(kernel.name, specialization, seconds),
            )
        return binary, self._folders[-1]


class LoadedKernel:
    """A kernel on a device, and the buffer of its arguments."""

    def __init__(self, driver: Driver, function: int, binary: Binary, specialization: Specialization) -> None:
        self._driver = driver
        self._binary = binary
        passed = [each for each in specialization.types if each != CONSTANT]
        letters = "".join("Q" if each.startswith("*") else _slot(SCALARS[each]) for each in passed)
        self._layout = struct.Struct(f"<{letters}{'Q' * binary.num_hidden}")
        self._buffer = ctypes.create_string_buffer(max(self._layout.size, 8))
        start, num_slots = ctypes.addressof(self._buffer), len(passed) + binary.num_hidden
        self._pointers = (ctypes.c_void_p * num_slots)(*(start + 8 * slot for slot in range(num_slots)))
        self._hidden = (0,) * binary.num_hidden
        self._needs_memory = binary.scratch_bytes + binary.profile_bytes > 0
        self._config = LaunchConfig(
            block_x=32 * binary.num_warps, block_y=1, block_z=1, shared_bytes=binary.shared_bytes
        )
        if binary.waits:
            self._attribute = early_start()
            self._config.attributes = ctypes.addressof(self._attribute)
            self._config.num_attributes = 1
        self._addresses = (ctypes.addressof(self._config), function, ctypes.addressof(self._pointers), None)
        self._lock = threading.Lock()  # the driver reads the buffers during the launch

    def launch(self, grid: tuple[int, ...], values: list[Any], device: int, stream: int) -> None:
        """Launches the kernel, unless the grid is empty.

        `grid` has three sizes; `values` are the kernel's arguments without those that are None.

        Raises:
            DriverError: the driver refuses the launch.
        """
        if not (grid[0] and grid[1] and grid[2]):
            return
        hidden, config, driver = self._hidden, self._config, self._driver
        if self._needs_memory:
            memory = _scratch(self._binary, grid)  # returned to the stream's pool behind the launch
            hidden = tuple(each.data_ptr() for each in memory)[: len(hidden)]
        with self._lock:
            self._layout.pack_into(self._buffer, 0, *values, *hidden)
            config.grid_x, config.grid_y, config.grid_z = grid
            config.stream = stream
            result = driver.launch(*self._addresses)
            if is_context_missing(result):
                driver.enter(device)
                result = driver.launch(*self._addresses)
        if result:
            name = f"{self._binary.kernel}{self._binary.specialization}"
            driver.check(f"the launch of {name} with a grid of {grid}", result)


def specialize(
    kernel: KernelFunction,
    types: Sequence[Any],
    constants: Mapping[str, Any],
    num_warps: int,
    num_stages: int,
) -> Specialization:
    """The form of the kernel for arguments of these types.

    Raises:
        TypeError: the constants are not the kernel's, or an argument has a type that none can have.
    """
    values = {name: constants.get(name, default) for name, default in kernel.constants.items()}
    if missing := [name for name, value in values.items() if isinstance(value, type)]:
        raise TypeError(f"kernel {kernel.name} lacks its constants {', '.join(missing)}")
    if unknown := set(constants) - set(values):
        raise TypeError(f"kernel {kernel.name} has no constants {', '.join(sorted(unknown))}")
    named: dict[str, str] = {}
    unaligned: list[str] = []
    for name, kind in zip(kernel.arguments, types, strict=True):
        if kind is None:
            values[name] = None
            continue
        if isinstance(kind, tuple):
            unaligned.append(name)
            [kind] = kind
        named[name] = _type_name(kernel, name, kind)
    return Specialization(
        tuple(named.get(name, CONSTANT) for name in kernel.parameters),
        tuple((name, values[name]) for name in kernel.parameters if name in values),
        tuple(unaligned),
        num_warps,
        num_stages,
    )


def _type_name(kernel: KernelFunction, name: str, kind: Any) -> str:
    is_tensor = isinstance(kind, torch.dtype)
    if is_tensor != is_pointer(name):
        raise TypeError(f"kernel {kernel.name}: {name} must be {'no' if is_tensor else 'a'} tensor")
    if is_tensor:
        return POINTER_TYPES[kind]
    if name in kernel.annotated:
        return kernel.annotated[name]
    return "fp32" if kind is float else "i64" if kind is _LONG else "i32"


def _read_arguments(arguments: Iterable[Any]) -> tuple[tuple[Any, ...], list[Any]]:
    """Reads of each argument what a compiled form depends on, and the value to pass.

    Of a tensor, the former is its dtype, in a tuple if its address is no multiple of `ALIGNMENT`.
    """
    types: list[Any] = []
    values: list[Any] = []
    for each in arguments:
        kind = type(each)  # `isinstance` of a tensor is slow for what is none
        if kind is int:
            types.append(int if -(2**31) <= each < 2**31 else _LONG)
            values.append(each)
        elif kind is float:
            types.append(float)
            values.append(each)
        elif each is None:
            types.append(None)
        elif isinstance(each, Tensor):
            address = each.data_ptr()
            types.append((each.dtype,) if address % ALIGNMENT else each.dtype)
            values.append(address)
        else:
            raise TypeError(f"a kernel's argument must be a tensor, a number or None; got {each!r}")
    return tuple(types), values


def _in_order(
    kernel: KernelFunction, arguments: Sequence[Any], constants: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments that were passed by their names, and constants that were passed without."""
    named = {**dict(zip(kernel.parameters, arguments, strict=False)), **constants}
    if missing := [name for name in kernel.arguments if name not in named]:
        raise TypeError(f"kernel {kernel.name} lacks its arguments {', '.join(missing)}")
    return [named.pop(name) for name in kernel.arguments], named


def _slot(letter: str) -> str:
    return _SLOT.get(letter, letter)


def _scratch(binary: Binary, grid: tuple[int, ...]) -> list[Tensor]:
    programs = math.prod(grid)
    sizes = (programs * each for each in (binary.scratch_bytes, binary.profile_bytes))
    return [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]


def _current_stream() -> tuple[int, int]:
    device = torch._C._cuda_getDevice()
    return device, torch._C._cuda_getCurrentRawStream(device)


def _in_memory(error: OSError) -> Path:
    """A folder for kernels, and for what the compiler keeps itself, after a disk has refused them. Raises `error` if
    there is one already, or none can be made."""
    if _is_in_memory():
        raise error
    logger.warning(
        "Kernels that are compiled from now on cannot be kept, so the next start compiles them again: %s. Free space, "
        "or set QUIRE_CACHE_ROOT and TRITON_CACHE_DIR to other folders.",
        error,
    )
    try:
        folder = Path(tempfile.mkdtemp(prefix=_IN_MEMORY, dir="/dev/shm"))
    except OSError:
        raise error from None
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    return folder


def _is_in_memory() -> bool:
    return f"/dev/shm/{_IN_MEMORY}" in os.environ.get("TRITON_CACHE_DIR", "")


def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        logger.warning(
            "Kernels that are compiled at this start cannot be kept: %s. Set QUIRE_CACHE_ROOT to another folder.", error
        )
        return Path(tempfile.mkdtemp(prefix="quire-kernels-"))
