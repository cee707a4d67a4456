"""Transfers between host and device. The host waits only for the values that it needs."""

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from quire.ops.host_arrays import to_device


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


class CudaTransfer:
    """Copies into pinned memory, and an event behind them in the stream."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._copies = [
            torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
            for tensor in tensors
        ]
        self._event = torch.cuda.Event()
        self._event.record()

    @property
    def is_done(self) -> bool:
        return self._event.query()

    def values(self) -> list[Tensor]:
        self._event.synchronize()
        return self._copies


class CudaTransfers:
    """Transfers from the current CUDA device, in its current stream."""

    are_free = False

    def to_host(self, tensors: Sequence[Tensor]) -> Transfer:
        return CudaTransfer(tensors)


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


_ALIGNMENT = 8
"""Bytes that the start of each array in a packed copy is a multiple of."""


def to_device_together(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Like `to_device`, of all `arrays` in one copy. On a device that is the host, nothing is copied."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    parts = [np.ascontiguousarray(array) for array in arrays]
    starts = np.cumsum([0, *(-(-part.nbytes // _ALIGNMENT) * _ALIGNMENT for part in parts)])
    packed = np.empty(starts[-1], np.uint8)
    for part, start in zip(parts, starts, strict=False):
        packed[start : start + part.nbytes] = part.reshape(-1).view(np.uint8)
    there = to_device(packed, device)
    return [
        there[start : start + part.nbytes].view(torch.from_numpy(part).dtype).view(part.shape)
        for part, start in zip(parts, starts, strict=False)
    ]
