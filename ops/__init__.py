"""Kernels behind plain operations: `quire.ops.backend` declares the operations; `bind` chooses their backend."""

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from quire.ops.backend import Backend


def bind(device: Literal["cpu", "cuda"] | str, *, serves: bool = False, is_invariant: bool = False) -> "Backend":
    """Returns the backend for a device type, and prepares this process for it.

    A process that `serves` requests tests the kernels of an accelerator that no process has tested before. If
    `is_invariant`, a row of linear layers has the same bits beside any number of others; on a CPU it always has.

    Raises:
        ValueError: there is no backend for `device`.
    """
    # Imported on demand: a CPU process loads no code for accelerators, and a build of kernels needs no torch.
    if device == "cpu":
        from quire.ops.cpu import binding

        return binding.bind()
    if device == "cuda":
        from quire.ops.triton import binding as triton_binding

        return triton_binding.bind(serves=serves, is_invariant=is_invariant)
    raise ValueError(f"No kernels for device {device!r}; choose cpu or cuda.")


def settle(device: str) -> None:
    """Returns memory to the system that only the build of a model needed. Call it during and after the build."""
    if device == "cpu":
        from quire.ops.cpu.memory import return_freed_memory

        return_freed_memory()
