"""The interface of a method of drafting, and the parts that one is built of."""

from typing import NamedTuple, Protocol

from quire.core.config.resolved import EngineConfig, ModelSpec
from quire.core.config.speculative import Speculation
from quire.executor.models.base import Model
from quire.executor.sampling.sampler import Sampler
from quire.executor.step.forward import Forward
from quire.executor.step.recorded_steps import RecordedSteps
from quire.executor.step.request_table import RequestTable
from quire.executor.step.speculator import ForwardReads, Speculator


class LoadedDraft(NamedTuple):
    """The model of a method that reads a checkpoint.

    Attributes:
        forward: runs it on its caches.
        recorded: its decode steps.
    """

    spec: ModelSpec
    model: Model
    forward: Forward
    recorded: RecordedSteps


class MethodParts(NamedTuple):
    """What a method is built of, in a worker whose memory is allocated.

    Attributes:
        target: the model whose tokens are drafted.
        draft: None for methods that read no checkpoint.
        max_model_len: the most tokens of a sequence.
    """

    config: EngineConfig
    speculation: Speculation
    target: Model
    draft: LoadedDraft | None
    table: RequestTable
    sampler: Sampler
    max_model_len: int


class Method(Protocol):
    """A class of `METHODS`: what it needs of the models, and how its speculator is built."""

    @classmethod
    def reads_of(cls, config: EngineConfig) -> ForwardReads:
        """What its speculator will read of each forward pass. Called before the models are loaded."""
        ...

    @classmethod
    def check(cls, config: EngineConfig, target: Model, draft: Model | None) -> None:
        """Refuses models with which it cannot draft. Raises ModelLoadError."""
        ...

    @classmethod
    def build(cls, parts: MethodParts) -> Speculator:
        """Builds the speculator."""
        ...
