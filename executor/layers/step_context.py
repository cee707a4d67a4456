"""What one step is about, as a model's layers see it. A new aspect of a step is a field here, read by the layer that
cares."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from quire.executor.layers.rotary import RotaryEmbedding
from quire.ops.backend import AttentionBatch


class LayerCache(NamedTuple):
    """Where one layer keeps its keys and values.

    Attributes:
        pages: [num_pages, ...], as `Backend.kv_cache_shape` says.
        group: the layer's KV group, whose block tables say which pages are whose.
    """

    pages: Tensor
    group: int


class GivenRows(NamedTuple):
    """Rows to be taken in the place of the embeddings of some tokens of a step.

    Attributes:
        places: [num_rows] int64; indices into the step's tokens.
        rows: [num_rows, hidden], of the model's type.
    """

    places: Tensor
    rows: Tensor


class Wanted(NamedTuple):
    """The tokens of a step whose hidden states will be read: of the others the last layer makes keys and values only.

    Attributes:
        tokens: [num_wanted] int64; indices into the step's tokens.
        attention: by KV group, their attention: of rows that have some of them, as many queries.
    """

    tokens: Tensor
    attention: Sequence[AttentionBatch]


class StepContext:
    """One step of a model.

    Attributes:
        positions: [num_tokens] int64; each token's place in its sequence.
        caches: by layer that the rank builds.
        attention: by KV group, where each token reads and writes.
        given: rows that stand in the place of embeddings, if any.
        wanted: the tokens whose hidden states will be read; None: all.
    """

    def __init__(
        self,
        positions: Tensor,
        caches: Sequence[LayerCache],
        attention: Sequence[AttentionBatch],
        *,
        given: GivenRows | None = None,
        wanted: Wanted | None = None,
    ) -> None:
        self.positions = positions
        self.caches = caches
        self.attention = attention
        self.given = given
        self.wanted = wanted
        self._rotations: dict[RotaryEmbedding, tuple[Tensor, Tensor]] = {}

    def rotation(self, rotary: RotaryEmbedding) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the step's positions, computed once for all layers that share `rotary`."""
        found = self._rotations.get(rotary)
        if found is None:
            found = self._rotations[rotary] = rotary(self.positions)
        return found
