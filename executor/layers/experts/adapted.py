"""The low-rank weights that adapters add to experts."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from quire.executor.layers.adapted import base_layers
from quire.executor.layers.adapters import Adapters, BaseLayer, ExpertNames, LayerAdapters
from quire.executor.layers.context import ModelContext
from quire.executor.layers.experts.shape import ExpertShape
from quire.executor.layers.experts.stored import StoredExperts
from quire.executor.weights.readers import Shard
from quire.ops.experts import LowRankExperts
from quire.ops.linear import LowRankWeights


class _Layers(NamedTuple):
    """One expert's layers: gates and ups, or ups alone, and the layer after them."""

    first: list[BaseLayer]
    down: BaseLayer


class ExpertAdapters:
    """The weights of a rank's experts, each of which has its layers in the place of adapters.

    Attributes:
        layers: of all experts.
    """

    def __init__(
        self,
        context: ModelContext,
        place: Adapters,
        stored: StoredExperts,
        shape: ExpertShape,
        own: Sequence[int],
        shard: Shard,
    ) -> None:
        """Takes as `own` the indices of the rank's experts, and as `shard` their intermediate dimensions."""
        self._place = place
        self._version = 0
        self._is_used = False
        experts = [_layers_of(context, stored, shape, index, shard) for index in own]
        num_adapters, rank = place.limits.num_adapters, place.limits.max_rank
        num_parts, size = len(experts[0].first), shard.stop - shard.start
        numbers = num_adapters * len(own)
        ranks = place.zeros(numbers, dtype=place.index_dtype)
        self._gate_up = LowRankWeights(
            place.zeros(numbers, num_parts * rank, shape.hidden_size),
            place.zeros(numbers, rank, num_parts * size),
            (size,) * num_parts,
            ranks,
        )
        self._down = LowRankWeights(
            place.zeros(numbers, rank, size), place.zeros(numbers, rank, shape.hidden_size), (shape.hidden_size,), ranks
        )
        self.layers: list[LayerAdapters] = []
        for number, (first, down) in enumerate(experts):
            of_expert = slice(number, None, len(own))
            whole = [Shard(1, 0, shape.hidden_size)]
            for bases, in_shards, all_weights in ((first, whole, self._gate_up), ([down], [shard], self._down)):
                a, b, sizes, *_ = all_weights
                weights = LowRankWeights(a[of_expert], b[of_expert], sizes, ranks[of_expert])
                self.layers.append(LayerAdapters(place, bases, in_shards, sizes, has_bias=False, weights=weights))
        names = [[base.part.name for base in (*first, down)] for first, down in experts]
        place.add_experts(ExpertNames(stored.mixture, shape, list(own), names, stored.is_interleaved), self.layers)

    def of_step(self, x: Tensor) -> LowRankExperts | None:
        """Returns the weights for a step's tokens `x` [num_tokens, hidden]; None: no adapter adds any."""
        if self._version != self._place.version:
            self._version, self._is_used = self._place.version, any(layer.is_used for layer in self.layers)
        if not self._is_used or not self._place.is_active:
            return None
        return LowRankExperts(self._gate_up, self._down, self._place.tokens(len(x)))


def _layers_of(context: ModelContext, stored: StoredExperts, shape: ExpertShape, index: int, shard: Shard) -> _Layers:
    first, down = stored.parts(shape, index, shard)
    return _Layers(
        base_layers(context, first, shape.hidden_size, bias=False),
        base_layers(context, [down], shape.size, bias=False)[0],
    )
