"""The kernels of plain operations: layer norm, sums, joins, factors, activations without a gate, merged
attention, low-rank products."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.ops.activations import Activation, PlainActivation
from quire.ops.cpu import calls
from quire.ops.cpu.calls import ACTIVATIONS, DTYPES
from quire.ops.cpu.fallbacks import Fallbacks
from quire.ops.cpu.launches import Launcher
from quire.ops.eager.backend import EagerBackend
from quire.ops.linear import LowRankWeights


class PlainKernels:
    """Operations of `Backend`; calls that the kernels do not cover go to `eager`."""

    def __init__(self, launcher: Launcher, eager: EagerBackend[Any], fallbacks: Fallbacks) -> None:
        self._eager = eager
        self._fallbacks = fallbacks
        self._empty = launcher.empty
        self._layer_norm = launcher.bind(calls.LAYER_NORM)
        self._add_layer_norm = launcher.bind(calls.ADD_LAYER_NORM)
        self._add = launcher.bind(calls.ADD)
        self._copy_columns = launcher.bind(calls.COPY_COLUMNS)
        self._scale = launcher.bind(calls.SCALE)
        self._activate = launcher.bind(calls.ACTIVATE)
        self._merge_attention = launcher.bind(calls.MERGE_ATTENTION)
        self._add_low_rank = launcher.bind(calls.ADD_LOW_RANK)
        self._keep = launcher.keep

    def layer_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        given = [tensor for tensor in (weight, bias) if tensor is not None]
        is_covered = x.dtype in DTYPES and all(tensor.is_contiguous() and tensor.dtype in DTYPES for tensor in given)
        if x.dim() == 2:
            return self.layer_norm(x.unsqueeze(1), weight, bias, eps).squeeze(1)
        if x.dim() == 3 and x.stride(2) == 1 and is_covered and len({tensor.dtype for tensor in given}) < 2:
            out = self._empty(*x.shape, dtype=x.dtype)
            weight_stride = x.shape[2] if weight is not None and weight.dim() == 2 else 0
            if not self._layer_norm(
                x.data_ptr(), *(0 if tensor is None else tensor.data_ptr() for tensor in (weight, bias)),
                out.data_ptr(), *x.shape, x.stride(0), x.stride(1), weight_stride, DTYPES[x.dtype],
                DTYPES[given[0].dtype if given else x.dtype], torch.get_num_threads(), eps,
            ):  # fmt: skip
                return out
        return self._fallbacks.run(self._eager.layer_norm, x, weight, bias, eps)

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        given = [tensor for tensor in (weight, bias) if tensor is not None]
        is_dense = _is_dense(x) and _is_dense(residual) and all(_is_dense(tensor) for tensor in given)
        if is_dense and x.dim() == 2 and x.dtype == residual.dtype and len({tensor.dtype for tensor in given}) < 2:
            out = self._empty(*x.shape, dtype=x.dtype)
            addresses = [0 if tensor is None else tensor.data_ptr() for tensor in (weight, bias)]
            if not self._add_layer_norm(
                x.data_ptr(), residual.data_ptr(), *addresses, out.data_ptr(), *x.shape, DTYPES[x.dtype],
                DTYPES[given[0].dtype if given else x.dtype], torch.get_num_threads(), eps,
            ):  # fmt: skip
                return out, residual
        return self._fallbacks.run(self._eager.add_layer_norm, x, residual, weight, bias, eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        threads = torch.get_num_threads()
        dense = _is_dense(x) and _is_dense(residual) and x.dtype == residual.dtype
        if dense and not self._add(x.data_ptr(), residual.data_ptr(), x.numel(), DTYPES[x.dtype], threads):
            return residual
        return self._fallbacks.run(self._eager.add, x, residual)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        num_tokens, size, dtype = len(parts[0]), sum(part.shape[1] for part in parts), parts[0].dtype
        if any(part.stride(1) != 1 or part.dtype != dtype for part in parts):
            return self._fallbacks.run(self._eager.join, parts)
        out, start = self._empty(num_tokens, size, dtype=dtype), 0
        for part in parts:
            self._copy_columns(
                part.data_ptr(), out[:, start:].data_ptr(), num_tokens, part.shape[1] * dtype.itemsize,
                part.stride(0) * dtype.itemsize, size * dtype.itemsize, torch.get_num_threads(),
            )  # fmt: skip
            start += part.shape[1]
        return out

    def scale(self, x: Tensor, factor: float, softcap: float | None) -> Tensor:
        threads, cap = torch.get_num_threads(), softcap or 0.0
        if _is_dense(x) and not self._scale(x.data_ptr(), x.numel(), DTYPES[x.dtype], threads, factor, cap):
            return x
        return self._fallbacks.run(self._eager.scale, x, factor, softcap)

    def activate(self, x: Tensor, activation: PlainActivation) -> Tensor:
        threads, code = torch.get_num_threads(), ACTIVATIONS[activation]
        if _is_dense(x) and not self._activate(x.data_ptr(), x.numel(), code, DTYPES[x.dtype], threads):
            return x
        return self._fallbacks.run(self._eager.activate, x, activation)

    def add_low_rank(self, x: Tensor, out: Tensor, weights: LowRankWeights, adapters: Tensor) -> Tensor:
        if _takes_low_rank(x, out, weights, adapters) and not self._low_rank(x, out, weights, adapters, 0, 0):
            return out
        return self._fallbacks.run(self._eager.add_low_rank, x, out, weights, adapters)

    def gated_low_rank(
        self, x: Tensor, out: Tensor, weights: LowRankWeights, adapters: Tensor, activation: Activation
    ) -> Tensor | None:
        """As `Backend.gated_low_rank`; None for tensors that the kernel does not take."""
        sizes = weights.sizes
        if not _takes_low_rank(x, out, weights, adapters) or len(sizes) != 2 or sizes[0] != sizes[1]:
            return None
        gated = self._empty(len(out), sizes[0], dtype=out.dtype)
        failed = self._low_rank(x, out, weights, adapters, gated.data_ptr(), ACTIVATIONS[activation])
        return None if failed else gated

    def _low_rank(
        self, x: Tensor, out: Tensor, weights: LowRankWeights, adapters: Tensor, gated: int, activation: int
    ) -> int:
        a, b, sizes, ranks, factors, shifts = weights
        ends = np.cumsum(sizes)
        self._keep(ends)
        others = [0 if each is None else each.data_ptr() for each in (ranks, factors, shifts)]
        return self._add_low_rank(
            x.data_ptr(), a.data_ptr(), b.data_ptr(), adapters.data_ptr(), ends.ctypes.data, *others, out.data_ptr(),
            gated, *x.shape, out.shape[1], len(sizes), b.shape[1], x.stride(0), out.stride(0), activation,
            DTYPES[x.dtype], torch.get_num_threads(),
        )  # fmt: skip

    def merge_attention(self, parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        (out, sums), head_dim = parts[0], parts[0][0].shape[2]
        alike = all(part.stride() == out.stride() and lse.stride() == sums.stride() for part, lse in parts)
        if alike and out.stride()[1:] == (head_dim, 1) and sums.stride(1) == 1 and out.dtype in DTYPES:
            merged = self._empty(*out.shape, dtype=out.dtype)
            addresses = [np.array([tensor.data_ptr() for tensor in tensors]) for tensors in zip(*parts, strict=True)]
            self._keep(addresses)
            if not self._merge_attention(
                *(array.ctypes.data for array in addresses), merged.data_ptr(), len(parts), *out.shape, out.stride(0),
                sums.stride(0), DTYPES[out.dtype], torch.get_num_threads(),
            ):  # fmt: skip
                return merged
        return self._fallbacks.run(self._eager.merge_attention, parts)


def _takes_low_rank(x: Tensor, out: Tensor, weights: LowRankWeights, adapters: Tensor) -> bool:
    is_one_type = {x.dtype, weights.a.dtype, weights.b.dtype} == {out.dtype} <= DTYPES.keys()
    return is_one_type and x.stride(1) == out.stride(1) == 1 and adapters.is_contiguous()


def _is_dense(x: Tensor) -> bool:
    return x.dtype in DTYPES and x.is_contiguous()
