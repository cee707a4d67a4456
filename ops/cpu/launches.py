"""Calls of the C++ kernels, and recordings: the kernels of a step as a list that one call runs again.

A recording is the CPU's counterpart of a CUDA graph. Without it, Python takes as long between two kernels as a small
kernel, and has to reacquire the interpreter's lock, which the engine's event loop may hold.
"""

import ctypes
import logging
import math
import weakref
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from quire.ops.cpu.calls import Call
from quire.ops.cpu.libraries import Kernels

logger = logging.getLogger(__name__)

_CACHE_LINE = 64

_QUESTIONS = frozenset(
    {"__get__", "__len__", "data_ptr", "dim", "element_size", "is_contiguous", "numel", "size", "stride"}
)
_VIEWS = frozenset(
    {"__getitem__", "chunk", "contiguous", "expand", "flatten", "narrow", "permute", "reshape", "split", "squeeze"}
    | {"to", "transpose", "unflatten", "unsqueeze", "view"}
)
"""Calls that return views. Some copy if they must; `_Watch` then counts them as foreign operations."""


class _Launch(ctypes.Structure):
    """`Launch` in launches.cpp. Keeps the bytes of its call alive."""

    _fields_ = (("kernel", ctypes.c_void_p), ("call", ctypes.c_char_p))


class Recording:
    """Kernels that can be launched again, in order, with the memory that they were recorded with."""

    def __init__(self, kernels: ctypes.CDLL, launches: list[_Launch], kept: list[Any]) -> None:
        """Takes as `kept` the objects whose memory the kernels read; they live as long as the recording."""
        self._run = kernels["quire_run"]
        self._run.argtypes = [ctypes.c_void_p, ctypes.c_long, ctypes.c_void_p]
        self._run.restype = ctypes.c_long
        self._kept = (launches, kept)
        self._launches = (_Launch * len(launches))(*launches)
        self._count = len(launches)

    def run(self) -> None:
        """Launches all kernels.

        Raises:
            RuntimeError: a kernel failed.
        """
        self._check(self._run(self._launches, self._count, None))

    def run_timed(self) -> list[float]:
        """Runs all kernels; returns the CLOCK_MONOTONIC time in seconds at which each was done."""
        ends = (ctypes.c_double * self._count)()
        self._check(self._run(self._launches, self._count, ends))
        return list(ends)

    def _check(self, failed: int) -> None:
        if failed:
            raise RuntimeError(f"launch {failed} of {self._count} in a recorded step failed")


class Launcher:
    """Binds kernels to their names, hands out memory for their outputs, and records both.

    All recordings share the memory of their outputs: an output is valid until the next recording is made or run.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._memory = _SharedMemory()
        self._launches: list[_Launch] | None = None  # while a recording is made
        self._kept: list[Any] = []

    def bind(self, call: Call) -> Callable[..., int]:
        """A function that calls the kernel with all fields of `call`, in order; it returns 0 if the kernel ran."""
        return self._bind_late(call) if call.part else self._bind(self._kernels, call)

    def bind_by_name(self, call: Call) -> Callable[..., int]:
        """As `bind`, for a kernel of many fields: the function takes each by its name."""
        launch, names = self.bind(call), call.fields
        values_of = itemgetter(*names)

        def launch_by_name(**fields: int | float) -> int:
            if fields.keys() != set(names):
                wrong = ", ".join(sorted(fields.keys() ^ set(names)))
                raise TypeError(f"{call.kernel} is called with other fields than it has: {wrong}")
            return launch(*values_of(fields))

        return launch_by_name

    def _bind_late(self, call: Call) -> Callable[..., int]:
        """The same for a kernel of a part, which the first call loads; without the part, no call runs."""
        launch: Callable[..., int] | None = None

        def launch_of_part(*fields: Any) -> int:
            nonlocal launch
            if launch is None:
                library = self._kernels.part(call.part)
                launch = (lambda *_: 1) if library is None else self._bind(library, call)
            return launch(*fields)

        return launch_of_part

    def _bind(self, library: ctypes.CDLL, call: Call) -> Callable[..., int]:
        kernel, pack = library[call.kernel], call.layout.pack
        kernel.argtypes = [ctypes.c_char_p]
        address = ctypes.cast(kernel, ctypes.c_void_p).value

        def launch(*fields: Any) -> int:
            packed = pack(*fields)
            failed = kernel(packed)
            if self._launches is not None and not failed:
                self._launches.append(_Launch(address, packed))
            return failed

        return launch

    def keep(self, memory: Any) -> None:
        """Keeps `memory`, which a kernel reads and which is no tensor, alive for the recording in progress, if any."""
        if self._launches is not None:
            self._kept.append(memory)

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """An uninitialized tensor for an output."""
        return torch.empty(shape, dtype=dtype) if self._launches is None else self._memory.empty(shape, dtype)

    def record(self, run: Callable[[], Tensor]) -> tuple[Tensor, Recording | None]:
        """Calls `run`, and returns its result and a recording of its launches.

        None instead of a recording if `run` did anything but launches and views of tensors; the log names those
        operations.
        """
        self._launches, self._kept = [], []
        try:
            with _Watch() as watch:
                result = run()
            if watch.strangers:
                names = ", ".join(sorted(set(watch.strangers)))
                logger.info("steps run without a recording, because they use torch's own operations: %s", names)
                return result, None
            return result, Recording(self._kernels, self._launches, self._kept) if self._launches else None
        finally:
            self._launches, self._kept = None, []
            self._memory.reuse()


class _SharedMemory:
    """Blocks of memory for outputs. A block is handed out again when no tensor uses it any more."""

    def __init__(self) -> None:
        self._blocks: list[np.ndarray] = []
        self._free: list[np.ndarray] = []
        self._round = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        block = self._take(max(num_bytes, _CACHE_LINE))
        # Each tensor has a separate array, which the tensor and all its views keep alive.
        array = block[:num_bytes]
        weakref.finalize(array, self._give_back, block, self._round)
        return torch.from_numpy(array).view(dtype).view(shape)

    def reuse(self) -> None:
        """Makes every block free, whether or not tensors still use it."""
        self._free = list(self._blocks)
        self._round += 1

    def _give_back(self, block: np.ndarray, handed_out: int) -> None:
        if handed_out == self._round:
            self._free.append(block)

    def _take(self, num_bytes: int) -> np.ndarray:
        fitting = [block for block in self._free if num_bytes <= len(block) <= 4 * num_bytes]
        if fitting:
            block = min(fitting, key=len)
            self._free = [other for other in self._free if other is not block]
            return block
        raw = np.empty((1 << (num_bytes - 1).bit_length()) + _CACHE_LINE, np.uint8)
        start = -raw.ctypes.data % _CACHE_LINE
        block = raw[start : len(raw) - _CACHE_LINE + start]
        self._blocks.append(block)
        return block


class _Watch(TorchFunctionMode):
    """Records the names of torch functions that do more than read a tensor's shape or return a view.

    Functions are watched, not operations: `TorchDispatchMode` would import torch's compiler, a second and 100 MB.
    """

    def __init__(self) -> None:
        super().__init__()
        self.strangers: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", str(func))
        if name not in _QUESTIONS and not (name in _VIEWS and _is_same_memory(result, args[0])):
            self.strangers.append(name)
        return result


def _is_same_memory(views: Any, x: Tensor) -> bool:
    """Returns True if a tensor, or each of several, shares the memory of `x`."""
    with torch._C.DisableTorchFunction():
        memory = x.untyped_storage().data_ptr()
        views = (views,) if isinstance(views, Tensor) else views
        return all(view.untyped_storage().data_ptr() == memory for view in views)
