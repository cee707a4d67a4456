"""Builds the CPU backend."""

from quire.ops.backend import Backend
from quire.ops.cpu.activation_bits import ActivationBits
from quire.ops.cpu.fallbacks import Fallbacks
from quire.ops.cpu.libraries import load_kernels
from quire.ops.cpu.memory import keep_freed_memory
from quire.ops.cpu.native import NativeBackend
from quire.ops.cpu.onednn import OneDnnLinear
from quire.ops.eager.backend import EagerBackend


def bind() -> Backend:
    """Returns the backend of the C++ kernels, or plain torch if they cannot be built, and prepares this process.

    Raises:
        ValueError: an environment variable has a wrong value, or asks for what this processor does not have.
    """
    keep_freed_memory()
    fallbacks = Fallbacks()
    kernels, plain = load_kernels(), EagerBackend(OneDnnLinear(fallbacks))
    return plain if kernels is None else NativeBackend(kernels, plain, fallbacks, ActivationBits.asked(kernels))
