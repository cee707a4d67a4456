"""The base of speculators of layers that read the target's hidden states."""

from typing import Any, ClassVar, Generic, Self, TypeVar

from quire.core.config.resolved import EngineConfig
from quire.core.wire.protocol import NewSlot
from quire.executor.models.base import BlockDraftHeads, DraftHeads, Model
from quire.executor.sampling.sampler import Sampler
from quire.executor.step.drafting.method import MethodParts
from quire.executor.step.drafting.target_pairs import options_of, reads, reads_of
from quire.executor.step.forward import Forward
from quire.executor.step.speculator import ForwardReads

Heads = TypeVar("Heads", DraftHeads, BlockDraftHeads)


class StateDrafts(Generic[Heads]):
    """Holds the layers, and what bounds their drafts.

    Args:
        model: the layers.
        forward: the same with their caches.
        sampler: draws drafts as it draws tokens; None: the likeliest tokens are the drafts.
        num_drafts: tokens proposed for a row.
        vocab_size: of the target.
        max_positions: the most tokens of a request that both models compute.

    Attributes:
        KIND: of the layers.
    """

    KIND: ClassVar[Any]
    sees_all_steps = True

    def __init__(
        self,
        model: Heads,
        forward: Forward,
        sampler: Sampler | None,
        *,
        num_drafts: int,
        vocab_size: int,
        max_positions: int,
    ) -> None:
        self.reads = reads(model.target_layers)
        self._model: Heads = model
        self._forward = forward
        self._sampler = sampler
        self._num_drafts = num_drafts
        self._vocab_size = vocab_size
        self._max_positions = max_positions

    @classmethod
    def reads_of(cls, config: EngineConfig) -> ForwardReads:
        return reads_of(config)

    @classmethod
    def check(cls, config: EngineConfig, target: Model, draft: Model | None) -> None:
        """Does nothing: layers that do not fit their target are refused as they are built."""

    @classmethod
    def build(cls, parts: MethodParts) -> Self:
        assert parts.draft is not None
        model: Any = parts.draft.model
        assert isinstance(model, cls.KIND)
        return cls(model, parts.draft.forward, **options_of(parts))

    def admit(self, request: NewSlot) -> None:
        """Does nothing: all state is in pages."""

    def release(self, slots: list[int]) -> None:
        """Does nothing."""
