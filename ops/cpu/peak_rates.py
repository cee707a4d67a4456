"""Measures this processor's best rates of reading memory and of multiplying, with the loaded kernels' instructions."""

import time

import numpy as np
import torch

from quire.ops.cpu import calls
from quire.ops.cpu.launches import Launcher
from quire.ops.cpu.libraries import load_kernels

_CACHED_BYTES = 96 << 20
"""More than the caches of most processors hold for two threads."""
_PIECES_PER_THREAD = 8


class Floors:
    """Times single rounds, on as many threads as torch has. The caller takes the best of several.

    Attributes:
        level: name of the kernels' level.
    """

    def __init__(self) -> None:
        """Raises RuntimeError if there are no kernels."""
        kernels = load_kernels()
        if kernels is None:
            raise RuntimeError("There are no CPU kernels here, so there is nothing to measure; the log says why.")
        self.level = kernels.level
        launcher = Launcher(kernels)
        self._read = launcher.bind(calls.READ_MEMORY)
        self._multiply = launcher.bind(calls.MULTIPLY)
        self._memory = np.ones(2 * _CACHED_BYTES // 8, np.int64)
        self._first = 0
        self._result = np.zeros(2, np.int64)

    def read(self) -> float:
        """Returns the bytes per second of one pass over memory that is in no cache."""
        self._first = _CACHED_BYTES - self._first  # the half that was not read last
        start = self._memory.ctypes.data + self._first
        begin = time.perf_counter()
        self._read(start, self._result.ctypes.data, _CACHED_BYTES, torch.get_num_threads())
        return _CACHED_BYTES / (time.perf_counter() - begin)

    def multiply(self, dtype: torch.dtype) -> float:
        """Returns multiplications and additions a second, with the level's instructions for `dtype`.

        It is float32, bfloat16, int8, or uint8 for 4-bit codes.
        """
        result, operations = (self._result[i:].ctypes.data for i in (0, 1))
        threads = torch.get_num_threads()
        begin = time.perf_counter()
        self._multiply(result, operations, _PIECES_PER_THREAD * threads, calls.CACHE_DTYPES[dtype], threads, 0.5)
        return int(self._result[1]) / (time.perf_counter() - begin)
