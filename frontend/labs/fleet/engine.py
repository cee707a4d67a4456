"""An engine without a model: the real scheduler, and steps that take an analytic time."""

from collections.abc import Callable
from typing import Annotated

from msgspec import Meta, Struct

from quire.core.config.resolved import SchedulerLimits
from quire.core.scheduling.scheduler import Scheduler
from quire.core.wire.kv_groups import KVGroupSpec
from quire.core.wire.protocol import EngineRequest, RequestDelta, SchedulerStats, StepPlan, StepResult


class EngineShape(Struct, frozen=True, kw_only=True):
    """The size of each engine, and what a step takes."""

    slots: Annotated[int, Meta(ge=1, description="Requests that an engine runs at once.")] = 64
    cache_tokens: Annotated[int, Meta(ge=64, description="Tokens that an engine's cache has room for.")] = 128_000
    chunk_tokens: Annotated[int, Meta(ge=1, description="Tokens of a step.")] = 2048
    step_ms: Annotated[float, Meta(gt=0, description="Milliseconds of a step beside its tokens.")] = 20.0
    token_us: Annotated[float, Meta(ge=0, description="Microseconds of each token of a step.")] = 40.0

    @property
    def limits(self) -> SchedulerLimits:
        return SchedulerLimits(
            max_num_seqs=self.slots, max_num_batched_tokens=self.chunk_tokens, prefix_caching_hash_algo="sha256"
        )


class NullEngine:
    """One plan is in flight at a time; every row samples the same token, so requests end by their length."""

    def __init__(self, shape: EngineShape, longest: int, clock: Callable[[], float]) -> None:
        limits = shape.limits
        self._shape = shape
        self._scheduler = Scheduler(
            limits,
            kv_groups=[KVGroupSpec("full", [0], page_bytes=1)],
            num_pages=shape.cache_tokens // limits.block_size,
            max_model_len=longest,
            eos_token_ids=(),
            clock=clock,
        )
        self._plan: StepPlan | None = None

    @property
    def is_busy(self) -> bool:
        """True if a step is under way."""
        return self._plan is not None

    @property
    def stats(self) -> SchedulerStats:
        return self._scheduler.stats()

    def add(self, request: EngineRequest) -> list[RequestDelta]:
        """Queues a request; returns the deltas of refused ones."""
        return self._scheduler.add(request)

    def begin(self) -> float | None:
        """Plans the next step; returns its seconds, or None if there is nothing to do."""
        self._plan = self._scheduler.schedule()
        if self._plan is None:
            return None
        return self._shape.step_ms / 1e3 + sum(self._plan.num_scheduled) * self._shape.token_us / 1e6

    def end(self) -> list[RequestDelta]:
        """The results of the step."""
        assert self._plan is not None
        plan, self._plan = self._plan, None
        return self._scheduler.update(StepResult(plan.step_id, [[1] for wanted in plan.num_wanted if wanted]))
