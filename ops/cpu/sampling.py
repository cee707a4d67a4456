"""The operations of sampling with the kernels of `kernels/sampling.cpp`."""

import numpy as np
import torch
from torch import Tensor

from quire.ops.cpu import calls
from quire.ops.cpu.calls import DTYPES
from quire.ops.cpu.fallbacks import Fallbacks
from quire.ops.cpu.launches import Launcher
from quire.ops.sampling import RowParameters, SamplingOperations, TokenPlaces


class NativeSampling(SamplingOperations):
    def __init__(self, launcher: Launcher, eager: SamplingOperations, fallbacks: Fallbacks) -> None:
        """`eager` takes the calls that the kernels do not cover."""
        self._eager = eager
        self._fallbacks = fallbacks
        self._draw = launcher.bind(calls.DRAW)
        self._likeliest = launcher.bind(calls.LIKELIEST)
        self._apply_bitmask = launcher.bind(calls.APPLY_BITMASK)

    def apply_bitmask(self, logits: Tensor, rows: np.ndarray, bitmask: np.ndarray) -> None:
        num_rows, size = logits.shape
        dense = rows.flags.c_contiguous and bitmask.flags.c_contiguous and bitmask.shape == (len(rows), -(-size // 32))
        # Pointers come from tensors, because `ndarray.ctypes` is Python code and takes five times as long.
        if dense and _is_rows(logits) and not self._apply_bitmask(
            logits.data_ptr(), torch.from_numpy(rows).data_ptr(), torch.from_numpy(bitmask).data_ptr(), len(rows),
            num_rows, size, logits.stride(0), DTYPES[logits.dtype], torch.get_num_threads(),
        ):  # fmt: skip
            return
        self._fallbacks.run(self._eager.apply_bitmask, logits, rows, bitmask)

    def likeliest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        if _is_rows(logits):
            token_ids, usable = _tokens(len(logits))
            if not self._likeliest(
                logits.data_ptr(), token_ids.data_ptr(), usable.data_ptr(), *logits.shape, logits.stride(0),
                DTYPES[logits.dtype], torch.get_num_threads(),
            ):  # fmt: skip
                return token_ids, usable
        return self._fallbacks.run(self._eager.likeliest, logits)

    def draw(self, logits: Tensor, starts: np.ndarray, positions: np.ndarray) -> tuple[Tensor, Tensor]:
        if _is_rows(logits) and starts.flags.c_contiguous and positions.flags.c_contiguous:
            token_ids, usable = _tokens(len(logits))
            if not self._draw(
                logits.data_ptr(), torch.from_numpy(starts).data_ptr(), torch.from_numpy(positions).data_ptr(),
                token_ids.data_ptr(), usable.data_ptr(), *logits.shape, logits.stride(0), DTYPES[logits.dtype],
                torch.get_num_threads(),
            ):  # fmt: skip
                return token_ids, usable
        return self._fallbacks.run(self._eager.draw, logits, starts, positions)

    def keep_min_p(self, logits: Tensor, log_min_p: np.ndarray) -> Tensor:
        return self._eager.keep_min_p(logits, log_min_p)

    def keep_top_k(self, logits: Tensor, top_k: np.ndarray) -> Tensor:
        return self._eager.keep_top_k(logits, top_k)

    def keep_top_p(self, logits: Tensor, top_p: np.ndarray) -> Tensor:
        return self._eager.keep_top_p(logits, top_p)

    def is_recordable(self, logits: Tensor) -> bool:
        return self._eager.is_recordable(logits)

    def choose(self, logits: Tensor, parameters: RowParameters | None, to: TokenPlaces) -> None:
        self._eager.choose(logits, parameters, to)


def _tokens(num_rows: int) -> tuple[Tensor, Tensor]:
    """Uninitialized outputs: ids, and whether each is usable."""
    return torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows, dtype=torch.bool)


def _is_rows(logits: Tensor) -> bool:
    return logits.dim() == 2 and logits.stride(1) == 1 and logits.dtype in DTYPES
