"""The operations of residual streams with the kernels of `kernels/streams.cpp`."""

import torch
from torch import Tensor

from quire.ops.cpu import calls
from quire.ops.cpu.calls import DTYPES
from quire.ops.cpu.fallbacks import Fallbacks
from quire.ops.cpu.launches import Launcher
from quire.ops.residual_streams import MIN_SQUARE, ResidualStreamOperations


class NativeResidualStreams(ResidualStreamOperations):
    """Residual streams by kernels. A token's result has the same bits in any batch."""

    def __init__(self, launcher: Launcher, eager: ResidualStreamOperations, fallbacks: Fallbacks) -> None:
        """`eager` takes the calls that the kernels do not cover."""
        self._eager = eager
        self._fallbacks = fallbacks
        self._empty = launcher.empty
        self._match = launcher.bind(calls.MATCH_MAGNITUDE)
        self._predict = launcher.bind(calls.PREDICT_STREAMS)
        self._correct = launcher.bind(calls.CORRECT_STREAMS)
        self._add_to_others = launcher.bind(calls.ADD_TO_OTHERS)
        self._keep_outliers = launcher.bind(calls.KEEP_OUTLIERS)

    def match_magnitude(self, x: Tensor, like: Tensor) -> Tensor:
        out = self._empty(*x.shape, dtype=x.dtype)
        if self._matched(x, like, out):
            return out
        return self._fallbacks.run(self._eager.match_magnitude, x, like)

    def expand(self, x: Tensor, projected: Tensor) -> Tensor:
        size = x.shape[1]
        streams = self._empty(1 + projected.shape[1] // size, *x.shape, dtype=x.dtype)
        parts = [x, *(projected[:, start : start + size] for start in range(0, projected.shape[1], size))]
        if all(self._matched(part, x, streams[index]) for index, part in enumerate(parts)):
            return streams
        return self._fallbacks.run(self._eager.expand, x, projected)

    def predict(self, streams: Tensor, coefficients: Tensor) -> Tensor:
        out = self._empty(*streams.shape, dtype=streams.dtype)
        if _are_covered(streams, coefficients) and not self._predict(
            streams.data_ptr(), coefficients.data_ptr(), out.data_ptr(), *streams.shape, coefficients.stride(0),
            DTYPES[out.dtype], torch.get_num_threads(),
        ):  # fmt: skip
            return out
        return self._fallbacks.run(self._eager.predict, streams, coefficients)

    def correct(self, streams: Tensor, activated: Tensor, coefficients: Tensor, active: int) -> Tensor:
        out = self._empty(*streams.shape, dtype=streams.dtype)
        if _are_covered(streams, activated, coefficients) and not self._correct(
            streams.data_ptr(), activated.data_ptr(), coefficients.data_ptr(), out.data_ptr(), *streams.shape,
            activated.stride(0), coefficients.stride(0), active, DTYPES[out.dtype], torch.get_num_threads(),
        ):  # fmt: skip
            return out
        return self._fallbacks.run(self._eager.correct, streams, activated, coefficients, active)

    def add_to_others(self, streams: Tensor, x: Tensor) -> None:
        if _are_covered(streams, x) and not self._add_to_others(
            streams.data_ptr(), x.data_ptr(), *streams.shape, x.stride(0), DTYPES[x.dtype], torch.get_num_threads()
        ):
            return
        self._fallbacks.run(self._eager.add_to_others, streams, x)

    def keep_outliers(self, gates: Tensor, whole: Tensor, deviations: float) -> None:
        if _are_covered(gates[None, :0], gates, whole) and not self._keep_outliers(
            gates.data_ptr(), whole.data_ptr(), *gates.shape, whole.shape[1], gates.stride(0), whole.stride(0),
            DTYPES[gates.dtype], torch.get_num_threads(), deviations,
        ):  # fmt: skip
            return
        self._fallbacks.run(self._eager.keep_outliers, gates, whole, deviations)

    def _matched(self, x: Tensor, like: Tensor, out: Tensor) -> bool:
        """Runs the kernel; returns True if it has written `out`. A row that equals its own magnitude is copied."""
        return _are_covered(out[None], x, like) and not self._match(
            x.data_ptr(), like.data_ptr(), out.data_ptr(), *x.shape, x.stride(0), like.stride(0), DTYPES[x.dtype],
            torch.get_num_threads(), MIN_SQUARE,
        )  # fmt: skip


def _are_covered(streams: Tensor, *rows: Tensor) -> bool:
    """Returns True if all have one floating-point dtype, the streams are dense, and so are the single `rows`."""
    same = streams.dtype in DTYPES and all(x.dtype == streams.dtype for x in rows)
    return same and streams.is_contiguous() and all(x.stride(1) == 1 for x in rows)
