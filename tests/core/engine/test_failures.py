"""Why an engine ended, as it says so itself."""

from quire.core.engine.failures import error_of, failure_of, fault_of
from quire.core.engine.process import _cause_of
from quire.core.errors import EngineDeadError, HostLostError, ModelLoadError, NoMemoryError, PeerLostError
from quire.core.wire.protocol import EngineFailed


def test_a_lost_host_is_told_apart_from_the_engine_s_own_failure_across_the_wire() -> None:
    for error in (HostLostError("a"), PeerLostError("a"), EngineDeadError("a")):
        assert type(failure_of(EngineFailed("a", _cause_of(error)))) is type(error)


def test_a_checkpoint_that_is_gone_is_told_apart_from_memory_that_is_short() -> None:
    for error, fault in ((ModelLoadError("a"), "setting"), (NoMemoryError("a"), "own")):
        across = failure_of(EngineFailed("a", _cause_of(error)))
        assert type(across) is type(error)
        assert fault_of(across) == fault
    assert fault_of(error_of("setting", "a")) == "setting"
