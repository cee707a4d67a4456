"""The tensor-parallel group: the two collectives that layers need, gloo on a CPU and NCCL on accelerators.

Every rank gets the same bits: a gather copies, and both libraries reduce each element in one place (or in one fixed
order) and hand the sum to all. Sampling on each rank from gathered logits therefore stays in step.
"""

import atexit
import os
from types import ModuleType

import torch

from quire.core.errors import ConfigError


class ParallelGroup:
    """A group of one rank, whose collectives are the identity. `create` gives a `DistributedGroup` for more ranks."""

    rank: int
    size: int

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of `x` over ranks, any shape and float dtype. May overwrite `x`; use only the returned tensor."""
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """`x` of every rank, joined along `dim` in rank order; all ranks give the same shape."""
        return x

    def close(self) -> None:
        """Leaves the group. Idempotent."""

    @classmethod
    def create(cls, rank: int, size: int, device: str, init_method: str) -> "ParallelGroup":
        """Joins the group of `size` ranks; returns once all have.

        Args:
            device: "cpu" or "cuda"; on cuda, rank i takes device i as its current one.
            init_method: where ranks meet, `file:///path/of/a/private/file` or `tcp://127.0.0.1:port`.

        Raises:
            ConfigError: there are fewer devices than ranks.
        """
        if size == 1:
            return cls()
        return DistributedGroup(rank, size, device, init_method)


class DistributedGroup(ParallelGroup):
    """A group of processes over torch.distributed."""

    def __init__(self, rank: int, size: int, device: str, init_method: str) -> None:
        super().__init__(rank, size)
        # Not at the top of the file: a single worker, the usual case, need not wait for this import.
        from torch import distributed

        self._distributed: ModuleType | None = distributed
        if device == "cuda":
            _check_devices(size)
            torch.cuda.set_device(rank)
        else:
            # Workers of one host need no other interface, and a loopback is there even where a host name is not.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        distributed.init_process_group(
            "nccl" if device == "cuda" else "gloo", init_method=init_method, rank=rank, world_size=size
        )
        atexit.register(self.close)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        self._open().all_reduce(x)
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._open().all_gather(parts, x)
        return torch.cat(parts, dim=dim)

    def close(self) -> None:
        if self._distributed is not None:
            distributed, self._distributed = self._distributed, None
            distributed.destroy_process_group()

    def _open(self) -> ModuleType:
        assert self._distributed is not None, "the group is closed"
        return self._distributed


def _check_devices(size: int) -> None:
    count = torch.cuda.device_count()
    if count < size:
        raise ConfigError(
            f"--tensor-parallel-size {size} needs {size} CUDA devices, and {count} are visible; "
            "lower it, or see CUDA_VISIBLE_DEVICES."
        )
