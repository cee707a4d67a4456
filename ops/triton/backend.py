"""The operations as Triton kernels; what has none yet runs in plain torch."""

from quire.ops.eager.backend import EagerBackend
from quire.ops.eager.linear import PlainLinear


class TritonBackend(EagerBackend):
    """A backend for accelerators. Each operation that is defined here replaces that of `EagerBackend`."""

    def __init__(self) -> None:
        super().__init__(PlainLinear())
