"""Kernels behind plain operations. `quire.ops.backend` says which; this module chooses who computes them."""

from typing import Literal

from quire.ops.backend import Backend


def bind(device: Literal["cpu", "cuda"] | str) -> Backend:
    """The backend for a device type; readies this process for it."""
    # Imported on demand, so that a CPU process never loads what only an accelerator needs.
    if device == "cpu":
        from quire.ops import cpu

        return cpu.bind()
    if device == "cuda":
        from quire.ops.eager.backend import EagerBackend
        from quire.ops.eager.linear import PlainLinear

        return EagerBackend(PlainLinear())
    raise ValueError(f"No kernels for device {device!r}; choose cpu or cuda.")


def settle(device: str) -> None:
    """Call when a model is built: what the building needed for a while, this process no longer holds."""
    if device == "cpu":
        from quire.ops.cpu.memory import return_freed_memory

        return_freed_memory()
