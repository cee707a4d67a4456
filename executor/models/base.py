"""The interface of a model, as the model runner sees it."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from quire.core.wire.media import MediaItem, Modality
from quire.executor.layers.adapters import AdapterWeight
from quire.executor.layers.attention.cross import CrossAttention
from quire.executor.layers.attention.layer_kv import AttentionKV
from quire.executor.layers.context import ModelContext
from quire.executor.layers.recurrent.state import LayerState
from quire.executor.layers.step_context import InputEmbeds, LayerCache, LayerTaps, ShardView, StepContext, Wanted
from quire.executor.layers.vocabulary import Embedding, Head

__all__ = [
    "AttentionKV",
    "BlockDraftHeads",
    "DraftHeads",
    "EncoderDecoder",
    "HasTaskAdapters",
    "InputEmbeds",
    "LastStateHeads",
    "LayerCache",
    "LayerState",
    "LayerTaps",
    "MediaRows",
    "MediaSupport",
    "MediaTowers",
    "Model",
    "ModelContext",
    "ReadsMedia",
    "ShardView",
    "ShowsEnds",
    "StagedModel",
    "StepContext",
    "Wanted",
]


class Model(Protocol):
    """A model on one rank. All sizes are this rank's own.

    A model without `kv_layers` and `state_layers` is an encoder: a step computes a sequence whole, and keeps nothing.
    """

    kv_layers: Sequence[AttentionKV]
    """The layers that keep keys and values of a sequence, in order."""

    state_layers: Sequence[LayerState]
    """The recurrent layers, with the states that each keeps of a sequence. They are numbered separately."""

    activation_size: int
    """The most values that a layer computes for each token; the residual stream does not count."""

    num_layer_outputs: int
    """The leading layers whose outputs `StepContext.taps` can collect; 0 for a model that shows none."""

    def forward(self, token_ids: Tensor, step: StepContext) -> Tensor:
        """Computes the hidden states of one step: [num_tokens, hidden], or [num_wanted, hidden] of the wanted tokens if
        this rank has the last layer that mixes tokens.

        Writes the new keys and values of all tokens into the step's caches. `token_ids` is [num_tokens] int64. Rows in
        the step replace the embeddings of their tokens.
        """
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Maps `hidden` [num_sampled, hidden] to logits [num_sampled, vocab_size], complete on each rank."""
        ...


@runtime_checkable
class EncoderDecoder(Model, Protocol):
    """A decoder with layers that attend to an encoder's output: those of `kv_layers` with `is_cross`."""

    def encode(self, content: Tensor, step: StepContext) -> None:
        """Encodes whole inputs, and stores the keys and values that the decoder's layers attend to, in
        `StepContext.encoder_slots` of their caches.

        `content` has the token ids of all inputs, [num_rows] int64, or their features, [num_inputs, num_channels,
        num_frames] float32.
        """
        ...


@runtime_checkable
class AlignsTokens(EncoderDecoder, Protocol):
    """A decoder whose attention to the encoder tells when its tokens were said."""

    @property
    def aligners(self) -> Sequence[CrossAttention]:
        """The attention to the encoder, layer by layer; their caches are the last of `kv_layers`."""
        ...


@runtime_checkable
class StagedModel(Model, Protocol):
    """A model that can build a range of its layers, as a pipeline stage.

    In a stage before the last, `forward` returns the next stage's input as one message of `num_tokens * handover_size`
    values in the model's dtype. The next stage finds it in `StepContext.received`.
    """

    def handover_size(self, hidden_size: int) -> int:
        """Counts the values of each token in such a message; `hidden_size` is the model's."""
        ...


@runtime_checkable
class ShowsEnds(Model, Protocol):
    """A model whose embedding and head others may use."""

    embed: Embedding
    head: Head


@runtime_checkable
class DraftHeads(Model, Protocol):
    """Layers that draft for another model, the target. Each token that they compute is a pair: the target's states at a
    position, and the next position's token, whose id `forward` takes.

    `forward` returns the hidden states that the pairs of further drafts have in place of the target's states. It finds
    these in `StepContext.target_states`.
    """

    target_layers: Sequence[int]
    """The target's layers whose outputs are its states, side by side; empty: its last hidden states are."""

    def read_target(self, states: Tensor) -> Tensor:
        """Maps the target's states [num_tokens, size] to `StepContext.target_states`."""
        ...


@runtime_checkable
class BlockDraftHeads(DraftHeads, Protocol):
    """Layers that make a block of drafts at once, in the places of mask tokens.

    With `StepContext.target_states`, `forward` keeps something of each, and its result is not read. Without, its tokens
    are blocks.
    """

    mask_token_id: int


@runtime_checkable
class LastStateHeads(Model, Protocol):
    """Layers that draft from a sequence's last hidden state, and keep nothing."""

    most_drafts: int
    """The drafts that they can make for a sequence."""

    def guess(self, token_ids: Tensor, states: Tensor, num_drafts: int) -> Tensor:
        """Returns the next tokens of sequences, [num_rows, num_drafts] int64.

        `token_ids` [num_rows] are their newest tokens, and `states` [num_rows, hidden] the target's, of which these
        were made.
        """
        ...


@runtime_checkable
class HasTaskAdapters(Model, Protocol):
    """A model whose weights bring an adapter for each of its tasks."""

    @property
    def task_adapter(self) -> Callable[[str], Mapping[str, AdapterWeight]]:
        """Reads the weights of a task's adapter, by the names of layers; they take away that of the loaded task.

        Raises ModelLoadError if a tensor is missing.
        """
        ...


class MediaSupport(NamedTuple):
    """What a model reads besides text.

    Attributes:
        modalities: kinds of items.
        sees_both_ways: the tokens of an image see each other.
        in_windows: they do in layers with a window alone.
        activation_size: the most values that a tower computes at once for each row; 0: nothing is known.
        num_deep: the first layers that a row has features for.
    """

    modalities: Sequence[Modality]
    sees_both_ways: bool = False
    in_windows: bool = False
    activation_size: int = 0
    num_deep: int = 0


class MediaRows(NamedTuple):
    """What a tower makes of one item.

    Attributes:
        rows: [num_rows, hidden], in place of the embeddings of the item's tokens.
        deep: [num_layers, num_rows, hidden], added to the outputs of the first layers; None: nothing is.
        layer_token: the token whose embeddings of layers stand beside each row; None: the class has none.
    """

    rows: Tensor
    deep: Tensor | None = None
    layer_token: int | None = None


class MediaTowers(Protocol):
    """Towers beside a decoder."""

    @property
    def support(self) -> MediaSupport:
        """What they read."""
        ...

    def encode(self, items: Sequence[MediaItem]) -> list[MediaRows]:
        """Runs items through their towers, as `ReadsMedia.encode_media`."""
        ...

    def positions(self, token_ids: Sequence[int], items: Sequence[MediaItem]) -> Tensor | None:
        """Returns the places of a prompt's tokens, as `ReadsMedia.media_positions`."""
        ...


@runtime_checkable
class ReadsMedia(Model, Protocol):
    """A model with towers for images or sounds."""

    @property
    def media(self) -> MediaSupport | None:
        """What its towers read; None: they were left out."""
        ...

    def encode_media(self, items: Sequence[MediaItem]) -> list[MediaRows]:
        """Runs items through their towers. All ranks call it with the same items, and get the rows of all.

        An item that a tower cannot read has rows of NaN.
        """
        ...

    def media_positions(self, token_ids: Sequence[int], items: Sequence[MediaItem]) -> Tensor | None:
        """Returns the places that a prompt's tokens are rotated by, [num_axes, num_tokens] int64 on the host; None if
        all places of a token are its position. Most models have three axes: time, height and width.
        """
        ...
