"""Values between host and device, without the host waiting for work that it does not need."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class Transfer(Protocol):
    """Some values on their way to the host."""

    @property
    def is_done(self) -> bool:
        """Whether they have arrived; so has all that the device was told to do before."""
        ...

    def values(self) -> list[Tensor]:
        """The values, on the host. Waits until the device has made them, and for nothing that it was told later."""
        ...


class Transfers(Protocol):
    """Starts transfers from one device.

    Attributes:
        are_free: the host can look at a value whenever it likes, because no other device computes it.
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
        """See `Transfer.values`."""
        return self._tensors


class HostTransfers:
    """Of a device that is the host: there is nothing to copy, and nothing to wait for."""

    are_free = True

    def to_host(self, tensors: Sequence[Tensor]) -> Transfer:
        """See `Transfers.to_host`."""
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
        """See `Transfer.is_done`."""
        return self._event.query()

    def values(self) -> list[Tensor]:
        """See `Transfer.values`."""
        self._event.synchronize()
        return self._copies


class CudaTransfers:
    """From the current CUDA device, in its current stream."""

    are_free = False

    def to_host(self, tensors: Sequence[Tensor]) -> Transfer:
        """See `Transfers.to_host`."""
        return CudaTransfer(tensors)


def transfers_from(device: torch.device) -> Transfers:
    """How values come from `device`."""
    return HostTransfers() if device.type == "cpu" else CudaTransfers()


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """`array` on `device`. The host does not wait: from pinned memory the device fetches it when it gets there."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
