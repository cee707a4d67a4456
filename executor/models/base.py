"""The interface of a model, as the model runner sees it."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from quire.executor.layers.context import ModelContext
from quire.executor.layers.layer_kv import AttentionKV
from quire.executor.layers.state import LayerState
from quire.executor.layers.step_context import GivenRows, LayerCache, PartialSight, StepContext, Wanted

__all__ = [
    "AttentionKV",
    "GivenRows",
    "LayerCache",
    "LayerState",
    "Model",
    "ModelContext",
    "PartialSight",
    "StagedModel",
    "StepContext",
    "Wanted",
]


class Model(Protocol):
    """A decoder on one rank. All sizes are this rank's own."""

    kv_layers: Sequence[AttentionKV]
    """The keys and values that each layer keeps of a sequence; layers that keep none have no place here."""

    state_layers: Sequence[LayerState]
    """The states that the recurrent layers keep of a sequence, in a numbering of their own."""

    activation_size: int
    """The most numbers that a layer makes of each token; the residual stream does not count."""

    def forward(self, token_ids: Tensor, step: StepContext) -> Tensor:
        """Hidden states of one step, [num_tokens, hidden], or [num_wanted, hidden] of the tokens that are wanted if
        this rank has the last layer that mixes tokens.

        Writes the new keys and values of all tokens into the step's caches. `token_ids` is [num_tokens] int64. Rows
        that the step gives replace the embeddings of their tokens, whatever the ids.
        """
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """`hidden` [num_sampled, hidden] → logits [num_sampled, vocab_size]: the whole vocabulary, on every rank."""
        ...


@runtime_checkable
class StagedModel(Model, Protocol):
    """A model that can build a range of its layers, as a pipeline stage.

    In a stage before the last, `forward` returns what the next stage needs of each token, as one message of
    `num_tokens * handover_size` numbers of the model's type. The next one finds it in `StepContext.received`.
    """

    def handover_size(self, hidden_size: int) -> int:
        """Numbers of each token in such a message; `hidden_size` is the model's."""
        ...
