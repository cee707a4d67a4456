"""Transfers between host and device, for which the host never waits longer than for the values that it needs."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class Transfer(Protocol):
    """Some values on their way to the host."""

    @property
    def is_done(self) -> bool:
        """Whether the values have arrived; the device has then done all work queued before, too."""
        ...

    def values(self) -> list[Tensor]:
        """The values, on the host. Waits until the device has made them, but not for work queued later."""
        ...


class Transfers(Protocol):
    """Starts transfers from one device.

    Attributes:
        are_free: the host can read a value at any time, because no other device computes it.
    """

    are_free: bool

    def to_host(self, tensors: Sequence[Tensor]) -> Transfer:
        """Starts to copy `tensors`, once the device has made them; returns at once."""
        ...


class Arrived:
    """Values that were on the host from the beginning."""

    is_done = True

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)

    def values(self) -> list[Tensor]:
        return self._tensors


class HostTransfers:
    """Transfers from a device that is the host: there is nothing to copy or to wait for."""

    are_free = True

    def to_host(self, tensors: Sequence[Tensor]) -> Transfer:
        return Arrived(tensors)


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
    """The transfers for values on `device`."""
    return HostTransfers() if device.type == "cpu" else CudaTransfers()


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """`array` on `device`. The host does not wait: the device copies from pinned memory in stream order."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
