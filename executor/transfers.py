"""Transfers between host and device. The host waits only for the values that it needs."""

import functools
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from quire.ops.host_arrays import to_device

_ALIGNMENT = 16
"""Bytes that the start of each array in a packed copy is a multiple of: kernels read so many at a time."""


class Transfer(Protocol):
    """Values on their way to the host."""

    @property
    def is_done(self) -> bool:
        """True if the values have arrived. The device has then finished all earlier work, too."""
        ...

    def values(self) -> list[Tensor]:
        """Returns the values on the host. Waits until the device has computed them, but not for later work."""
        ...


class Transfers(Protocol):
    """Starts transfers from one device.

    Attributes:
        are_free: the host can read a value at any time, because no other device computes it.
    """

    are_free: bool

    def to_host(self, tensors: Sequence[Tensor]) -> Transfer:
        """Starts to copy `tensors`, once the device has computed them; returns at once."""
        ...


class HostValues:
    """Values that are on the host already."""

    is_done = True

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)

    def values(self) -> list[Tensor]:
        return self._tensors


class HostTransfers:
    """Transfers from a device that is the host: there is nothing to copy or to wait for."""

    are_free = True

    def to_host(self, tensors: Sequence[Tensor]) -> Transfer:
        return HostValues(tensors)


class CudaTransfers:
    """Transfers from the current CUDA device, in a stream of their own: later steps do not wait for them.

    Nothing may write the tensors of `to_host` afterwards.
    """

    are_free = False

    _LARGEST_KEPT = 1 << 20
    """The most bytes of pinned memory that serve one transfer after the other."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._free: dict[int, list[Tensor]] = {}  # pinned buffers, by size

    def to_host(self, tensors: Sequence[Tensor]) -> Transfer:
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        sources, views = _together(tensors)
        starts = list(itertools.accumulate((_aligned(each.nbytes) for each in sources), initial=0))
        buffer = self._take(starts[-1])
        self._stream.wait_stream(torch.cuda.current_stream())
        event = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            copied = [
                buffer[start : start + each.nbytes].view(each.dtype).view(each.shape).copy_(each, non_blocking=True)
                for each, start in zip(sources, starts, strict=False)
            ]
            event.record()
        copies = views(copied)
        keep = functools.partial(self._free[len(buffer)].append, buffer) if len(buffer) in self._free else None
        return CudaTransfer(tensors, copies, event, keep)

    def _take(self, num_bytes: int) -> Tensor:
        """Returns pinned memory of at least `num_bytes`: a new allocation costs more than a small copy."""
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        if num_bytes > self._LARGEST_KEPT:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        size = 1 << (num_bytes - 1).bit_length()
        free = self._free.setdefault(size, [])
        return free.pop() if free else torch.empty(size, dtype=torch.uint8, pin_memory=True)


def _together(tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Callable[[list[Tensor]], list[Tensor]]]:
    """The tensors to copy instead of `tensors`, and how to view the copies: one tensor, where all share memory.

    Each copy takes a few microseconds of the device, however small it is.
    """
    if len(tensors) < 2 or len({each.untyped_storage().data_ptr() for each in tensors}) > 1:
        return tensors, list
    starts = [each.storage_offset() * each.itemsize for each in tensors]
    first, end = min(starts), max(start + each.nbytes for start, each in zip(starts, tensors, strict=True))
    is_dense = all(
        each.is_contiguous() and (start - first) % each.itemsize == 0
        for start, each in zip(starts, tensors, strict=True)
    )
    if not is_dense or end - first > sum(_aligned(each.nbytes) for each in tensors):
        return tensors, list
    whole = tensors[0].new_empty(0, dtype=torch.uint8).set_(tensors[0].untyped_storage(), first, (end - first,), (1,))

    def views(copied: list[Tensor]) -> list[Tensor]:
        return [
            copied[0][start - first : start - first + each.nbytes].view(each.dtype).view(each.shape)
            for start, each in zip(starts, tensors, strict=True)
        ]

    return [whole], views


class CudaTransfer:
    """Copies into pinned memory, and an event behind them in their stream."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        copies: list[Tensor],
        event: torch.cuda.Event,
        keep: Callable[[], object] | None,
    ) -> None:
        """`keep` takes the memory of the `copies` back, for other transfers; None: it is theirs alone."""
        self._sources: Sequence[Tensor] | None = tensors  # alive until they are copied
        self._copies = copies
        self._event = event
        self._keep = keep

    @property
    def is_done(self) -> bool:
        return self._event.query()

    def values(self) -> list[Tensor]:
        if self._sources is not None:
            self._event.synchronize()
            self._sources = None
            if self._keep is not None:
                self._copies = [copy.clone() for copy in self._copies]
                self._keep()
        return self._copies


def transfers_from(device: torch.device) -> Transfers:
    """Returns the transfers for values on `device`."""
    return HostTransfers() if device.type == "cpu" else CudaTransfers()


class Mirror:
    """Bytes that the host writes and the device reads, in memory that stays in place on both.

    Attributes:
        host: [num_bytes] uint8.
        there: the same on the device.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        # The system allocates np.zeros lazily: bytes that no step reaches cost no memory.
        self.host = np.zeros(num_bytes, np.uint8)
        self.there = torch.from_numpy(self.host)
        self._buffers: PinnedRing | None = None
        if device.type != "cpu":
            self.there = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
            self._buffers = PinnedRing()

    def upload(self, num_bytes: int) -> None:
        """Copies the host's first bytes, in stream order; the host may write the next values at once."""
        if self._buffers is not None:
            self._buffers.copy(self.host[:num_bytes], self.there)


class PinnedRing:
    """Pinned buffers that copies to the device use in turns, because a new one costs more than a small copy."""

    _COUNT = 4
    """The buffers: more than the steps that are in flight."""

    def __init__(self) -> None:
        self._buffers: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    def copy(self, array: np.ndarray, there: Tensor) -> None:
        """Copies `array` [n] uint8 to the start of `there`, in stream order. The host may change it at once."""
        buffer, event = self._take(len(array))
        buffer[: len(array)].numpy()[:] = array
        there[: len(array)].copy_(buffer[: len(array)], non_blocking=True)
        event.record()
        self._buffers.append((buffer, event))

    def _take(self, num_bytes: int) -> tuple[Tensor, torch.cuda.Event]:
        """Returns the buffer that was used longest ago, or a new one, and the event behind its next copy."""
        if len(self._buffers) >= self._COUNT:
            buffer, event = self._buffers.popleft()
            if len(buffer) >= num_bytes:
                event.synchronize()
                return buffer, event
        size = 1 << max(num_bytes - 1, 1).bit_length()
        return torch.empty(size, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()


def to_device_together(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Like `to_device`, of all `arrays` in one copy. On a device that is the host, nothing is copied."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    parts = [np.ascontiguousarray(array) for array in arrays]
    starts = np.cumsum([0, *(_aligned(part.nbytes) for part in parts)])
    packed = np.empty(starts[-1], np.uint8)
    for part, start in zip(parts, starts, strict=False):
        packed[start : start + part.nbytes] = part.reshape(-1).view(np.uint8)
    there = to_device(packed, device)
    return [
        there[start : start + part.nbytes].view(torch.from_numpy(part).dtype).view(part.shape)
        for part, start in zip(parts, starts, strict=False)
    ]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
