"""The reasons for an engine's end, as errors: from its last message or its failed launch, with the fault and a
remedy."""

import errno

import zmq

from quire.core.engine.restart_policy import Fault
from quire.core.errors import (
    EngineDeadError,
    EngineKilledError,
    HostLostError,
    ModelLoadError,
    NoMemoryError,
    PeerLostError,
    QuireError,
)
from quire.core.logging import get_logger
from quire.core.process_ends import EndOfProcess
from quire.core.wire import protocol

logger = get_logger(__name__)

_REMEDIES = {
    errno.EMFILE: "Raise the limit on the process's open files (ulimit -n).",
    errno.ENFILE: "Raise the machine's limit on open files (sysctl fs.file-max).",
    errno.ENOMEM: "Free memory on this machine.",
    errno.EAGAIN: "Raise the limit on the user's processes (ulimit -u).",
    errno.ENOSPC: "Free space on the disk.",
    errno.ENAMETOOLONG: "Name a folder with a shorter path in QUIRE_RPC_BASE_PATH.",
}


def failure_of(failed: protocol.EngineFailed) -> QuireError:
    """The error for an engine's own report that it failed."""
    match failed.cause:
        case "setting":
            return ModelLoadError(failed.message)
        case "memory":
            return NoMemoryError(failed.message)
        case "peer":
            return PeerLostError(f"the engine failed: {failed.message}")
        case "host":
            return HostLostError(f"the engine failed: {failed.message}")
        case "killed":
            return EngineKilledError(f"the engine failed: {failed.message}")
    return EngineDeadError(f"the engine failed: {failed.message}")


def end_of(ending: EndOfProcess, code: int, *, was_ready: bool) -> QuireError:
    """The error for the end of an engine's process that says no more than its exit code."""
    how = f"was killed by signal {-code}.{ending.hint(code)}" if code < 0 else f"ended with exit code {code}."
    message = f"the engine {how}"
    # A ready engine ends with 0 when somebody asks it to by SIGTERM: its own failures have other codes.
    is_told = code == 0 and was_ready
    return (EngineKilledError if is_told or ending.is_from_outside(code) else EngineDeadError)(message)


def error_of(fault: Fault, message: str) -> QuireError:
    """The error whose `fault_of` this is."""
    kinds: dict[Fault, type[QuireError]] = {
        "own": EngineDeadError,
        "setting": ModelLoadError,
        "peer": PeerLostError,
        "elsewhere": EngineKilledError,
    }
    return kinds[fault](message)


def is_external(error: Exception) -> bool:
    """Returns True if an engine ended because of another engine, of a host or of somebody outside."""
    return isinstance(error, PeerLostError | HostLostError | EngineKilledError)


def fault_of(end: QuireError) -> Fault:
    """The party at fault for an engine's end."""
    match end:
        case PeerLostError():
            return "peer"
        case HostLostError() | EngineKilledError():
            return "elsewhere"
        case NoMemoryError():
            return "own"
        case ModelLoadError():
            return "setting"
    return "own"


def explain(error: Exception) -> QuireError:
    """The error for an engine that could not be launched or watched, with a remedy."""
    match error:
        case QuireError():
            return error
        case OSError() | zmq.ZMQError():
            remedy = _REMEDIES.get(error.errno or 0, "")
            return EngineDeadError(f"the engine could not be run: {error}. {remedy}".rstrip())
        case _:
            logger.error("the engine could not be run", exc_info=error)
            return EngineDeadError(f"the engine could not be run: {type(error).__name__}: {error}.")
