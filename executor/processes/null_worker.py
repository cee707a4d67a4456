"""A worker without a model, which answers every plan at once, so that tests and benchmarks measure all other costs."""

from collections.abc import Callable
from typing import NamedTuple

from quire.core.config.resolved import EngineConfig
from quire.core.wire.kv_groups import KVGroupSpec
from quire.core.wire.protocol import StepPlan, StepResult, WorkerAnswer, WorkerCall, WorkerReady
from quire.core.wire.rank import Rank
from quire.core.wire.row_outputs import OutputKind, RequestFailure, RowOutput


class AnsweredStep(NamedTuple):
    """A step whose result exists as soon as it is launched."""

    result: StepResult

    @property
    def step_id(self) -> int:
        """The plan's id."""
        return self.result.step_id

    @property
    def is_done(self) -> bool:
        """Always True."""
        return True


class NullWorker:
    """Implements the interface of `quire.executor.worker.Worker` without torch and without memory."""

    peers = None

    def __init__(self, config: EngineConfig, rank: Rank, init_method: str) -> None:
        self._config = config
        self._rank = rank

    def load(self) -> WorkerReady:
        """Reports room for a full batch of full-length requests, or the pages that the configuration asks for."""
        limits = self._config.limits
        pages_per_request = -(-self._config.max_model_len // limits.block_size)
        return WorkerReady(
            rank=self._rank,
            num_pages=self._config.cache.num_gpu_blocks_override or limits.max_num_seqs * pages_per_request,
            max_model_len=self._config.max_model_len,
            weights_bytes=0,
            kv_cache_bytes=0,
            device_name="null",
            kv_groups=[KVGroupSpec("full", list(range(self._config.spec.num_layers)), page_bytes=0)],
        )

    def allocate(self, num_pages: int, max_model_len: int) -> None:
        """Does nothing: there is no cache."""

    def launch(self, plan: StepPlan) -> AnsweredStep:
        """Returns p + s, modulo the vocabulary, as the token after position p of slot s."""
        ends = zip(plan.slots, plan.num_computed, plan.num_scheduled, plan.num_wanted, strict=True)
        vocab_size = self._config.spec.vocab_size
        tokens = [[(slot + start + count) % vocab_size] for slot, start, count, wanted in ends if wanted]
        failure = RequestFailure("internal", "This worker has no model, and so no hidden states.")
        pooling: list[tuple[int, RowOutput]] = [
            (row, failure) for row, kind in plan.outputs if kind is not OutputKind.PROMPT_LOGPROBS
        ]
        return AnsweredStep(StepResult(plan.step_id, tokens, outputs=pooling))

    def collect(self, step: AnsweredStep) -> StepResult:
        """Returns the result of `launch`."""
        return step.result

    def call(self, call: WorkerCall, answer: Callable[[WorkerAnswer], None]) -> None:
        """Refuses the call: there is no model."""
        answer(WorkerAnswer(call.call_id, self._rank, error="this worker has no model"))
