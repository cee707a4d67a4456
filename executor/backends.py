"""Binds the operations for a device, with the errors of the executor."""

from quire import ops
from quire.core import envs
from quire.core.errors import ConfigError
from quire.ops.backend import Backend


def bind(device: str, *, serves: bool = False) -> Backend:
    """Binds the backend for `device` to this process, which `serves` requests or only looks at a model.

    Raises:
        ConfigError: there is none, or `QUIRE_CPU_ISA` asks for instructions that this processor does not have.
    """
    try:
        return ops.bind(device, serves=serves, is_invariant=envs.read_flag("BATCH_INVARIANT"))
    except ValueError as error:
        raise ConfigError(str(error)) from None
