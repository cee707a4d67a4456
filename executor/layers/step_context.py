"""The inputs of a step for a model's layers. A new kind of input is a field here."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from quire.executor.layers.positions.rotary import RotaryEmbedding
from quire.executor.parallel.context.keys import ShardView
from quire.ops.backend import AttentionBatch
from quire.ops.latent import Selection
from quire.ops.recurrent import StateRows


class LayerCache(NamedTuple):
    """The memory of one layer's keys and values.

    Attributes:
        pages: [num_pages, ...], as `Backend.kv_cache_shape` says.
        group: the layer's KV group, whose block tables name each request's pages.
    """

    pages: Tensor
    group: int


class InputEmbeds(NamedTuple):
    """Rows that replace the embeddings of some tokens of a step.

    Attributes:
        places: [num_rows] int64; indices into the step's tokens.
        rows: [num_rows, hidden], in the model's dtype.
        deep: [num_layers, num_rows, hidden], added to the outputs of the first layers; None: nothing is.
        layer_tokens: [num_rows] int64, tokens whose embeddings of layers stand beside the rows, -1 for none; None: no
            row has any.
    """

    places: Tensor
    rows: Tensor
    deep: Tensor | None = None
    layer_tokens: Tensor | None = None


class Wanted(NamedTuple):
    """The tokens of a step whose hidden states will be read. For others, the last layer computes only keys and values.

    Attributes:
        tokens: [num_wanted] int64; indices into the step's tokens.
        attention: by KV group, the attention of only these tokens, as the queries of the rows that have some.
        shard_view: of these tokens, as in `StepContext`.
    """

    tokens: Tensor
    attention: Sequence[AttentionBatch]
    shard_view: ShardView | None = None


class LayerTaps:
    """Collects the outputs of some layers during a step.

    Attributes:
        outputs: by layer, [num_tokens, hidden]; the residual stream after the layer.
    """

    def __init__(self, layers: Collection[int]) -> None:
        """Takes the indices of the layers."""
        self._layers = layers
        self.outputs: dict[int, Tensor] = {}

    def see(self, layer: int, output: Tensor, residual: Tensor | None) -> None:
        """Keeps a layer's output if it is wanted: the sum of the two, which later layers may change in place."""
        if layer in self._layers:
            self.outputs[layer] = output.clone() if residual is None else output + residual


class StepContext:
    """One step of a model.

    Attributes:
        positions: [num_tokens] int64; each token's place in its sequence, or the one that its rotation is by: in some
            models, an image takes fewer places than tokens.
        caches: by layer that the rank builds.
        attention: by KV group, the places that each token reads and writes; of the kind "cross", that it reads.
        shard_view: the tokens' view of this rank's part of the positions; None: it has all.
        input_embeds: rows that replace embeddings, if any.
        wanted: the tokens whose hidden states will be read; None: all.
        states: by recurrent layer that the rank builds, its tensors; the first dimension is the slot of a sequence.
        received: the previous pipeline stage's message in the model's dtype (`StagedModel`); None in the first stage.
        hands_over: a later stage continues with this one's result.
        taps: the outputs of layers that are read; None: no layer's is.
        selection: the tokens that the last layer with an indexer attended to, for layers that share its selection.
        token_types: [num_tokens] int64, the segment of each token; None: all are of the first.
        rotary_positions: [num_axes, num_tokens] int64, the places of tokens, such as time, height and width; None:
            all of them are `positions`.
        target_states: [num_tokens, size], what heads that draft read of the target for each token.
        encoder_slots: in a step of the encoder, by KV group of the kind "cross", [num_tokens] int64: the places of the
            keys and values that the decoder's layers keep of its output.
    """

    def __init__(
        self,
        positions: Tensor,
        caches: Sequence[LayerCache],
        attention: Sequence[AttentionBatch],
        *,
        shard_view: ShardView | None = None,
        input_embeds: InputEmbeds | None = None,
        wanted: Wanted | None = None,
        states: Sequence[Sequence[Tensor]] = (),
        rows: StateRows | None = None,
        received: Tensor | None = None,
        hands_over: bool = False,
        taps: LayerTaps | None = None,
        sequences: AttentionBatch | None = None,
        token_types: Tensor | None = None,
        encoder_slots: Mapping[int, Tensor] = {},
        rotary_positions: Tensor | None = None,
    ) -> None:
        self.positions = positions
        self.caches = caches
        self.attention = attention
        self.shard_view = shard_view
        self.input_embeds = input_embeds
        self.wanted = wanted
        self.states = states
        self.received = received
        self.hands_over = hands_over
        self.taps = taps
        self.selection: Selection | None = None
        self.token_types = token_types
        self.target_states: Tensor | None = None
        self.encoder_slots = encoder_slots
        self.rotary_positions = rotary_positions
        self._sequences = sequences
        self._rows = rows
        self._rotations: dict[RotaryEmbedding, tuple[Tensor, Tensor]] = {}
        self._wanted_rotations: dict[RotaryEmbedding, tuple[Tensor, Tensor]] = {}

    @property
    def rows(self) -> StateRows:
        """The step's rows, for recurrent layers."""
        assert self._rows is not None, "the model has a recurrent layer that it does not declare in state_layers"
        return self._rows

    @property
    def sequences(self) -> AttentionBatch:
        """The step's sequences, for the layers of encoders (`Backend.sequence_attention`)."""
        assert self._sequences is not None, "a model with a cache has a layer without one"
        return self._sequences

    @property
    def wanted_positions(self) -> Tensor:
        """The positions of the wanted tokens."""
        return self.positions if self.wanted is None else self.positions[self.wanted.tokens]

    def rotation(self, rotary: RotaryEmbedding) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the step's positions, computed once for all layers that share `rotary`."""
        found = self._rotations.get(rotary)
        if found is None:
            found = self._rotations[rotary] = rotary(self._places(rotary))
        return found

    def wanted_rotation(self, rotary: RotaryEmbedding) -> tuple[Tensor, Tensor]:
        """Returns `rotation` for the wanted tokens only."""
        if self.wanted is None:
            return self.rotation(rotary)
        found = self._wanted_rotations.get(rotary)
        if found is None:
            found = self._wanted_rotations[rotary] = rotary(self._places(rotary)[..., self.wanted.tokens])
        return found

    def _places(self, rotary: RotaryEmbedding) -> Tensor:
        """The positions of tokens, [num_tokens], or their places in time, height and width, [3, num_tokens]."""
        return self.rotary_positions if self.rotary_positions is not None and rotary.has_axes else self.positions
