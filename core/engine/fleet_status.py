"""The state and capacity of several engines as one."""

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from quire.core.engine.supervisor import EngineStatus
from quire.core.errors import ModelLoadError
from quire.core.wire.protocol import EngineReady


class FleetStatus(Struct, frozen=True):
    """The state of a frontend's engines.

    Attributes:
        engine: the state of all engines as one, which serves as long as any of them does. Its reason names the others.
        engines: the state of each engine, by number; empty for a single engine.
    """

    engine: EngineStatus
    engines: list[EngineStatus]

    @classmethod
    def of(cls, statuses: Sequence[EngineStatus]) -> "FleetStatus":
        """The status of engines, which are listed by number."""
        if len(statuses) == 1:
            return cls(statuses[0], [])
        best = min(statuses, key=lambda status: _ORDER.index(status.state))
        missing = [
            f"engine {number} is {each.state}" for number, each in enumerate(statuses) if each.state != "serving"
        ]
        reason = f"{'; '.join(missing)}." if missing else None
        return cls(EngineStatus(best.state, best.silent_seconds, reason), list(statuses))


_ORDER = ("serving", "restarting", "starting", "dead")


def agreed(engines: Sequence[EngineReady]) -> EngineReady:
    """The joint capacity of engines. Requests may move between them, so the shortest limit holds for all.

    Raises:
        ModelLoadError: they are not of one kind.
    """
    first, *others = engines
    for number, other in enumerate(others, start=1):
        if other.block_size != first.block_size or len(other.kv_groups) != len(first.kv_groups):
            raise ModelLoadError(
                f"Engine {number} has other KV groups than engine 0. All engines must load the same checkpoint with "
                "the same options and version of Quire."
            )
    return replace(
        first,
        num_pages=sum(each.num_pages for each in engines),
        max_model_len=min(each.max_model_len for each in engines),
        weights_bytes=sum(each.weights_bytes for each in engines),
        kv_cache_bytes=sum(each.kv_cache_bytes for each in engines),
    )
