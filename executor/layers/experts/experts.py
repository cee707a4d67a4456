"""The experts of a mixture, split over ranks.

Every rank has a part of each expert's intermediate dimensions, or, with expert parallelism, some of the experts whole.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quire.core.errors import ModelLoadError
from quire.executor.layers.adapters import LayerAdapters
from quire.executor.layers.context import ModelContext
from quire.executor.layers.experts.adapted import ExpertAdapters
from quire.executor.layers.experts.exchange import ExpertExchange
from quire.executor.layers.experts.places import ExpertPlaces
from quire.executor.layers.experts.shape import ExpertShape
from quire.executor.layers.experts.stored import StoredExperts
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.weights.readers import Shard
from quire.ops.activations import Activation
from quire.ops.experts import ExpertCall, UnlikeExpertsError


class Experts:
    """All experts of a layer.

    Attributes:
        activation_size: values that the layer computes for each token, if `top_k` experts are chosen.
    """

    def __init__(
        self,
        context: ModelContext,
        stored: StoredExperts,
        shape: ExpertShape,
        top_k: int,
        activation: Activation = "silu",
        *,
        weighs_inputs: bool = False,
    ) -> None:
        """`weighs_inputs` as for `Backend.experts`."""
        if top_k > shape.num_experts:
            raise ModelLoadError(f"config.json asks for {top_k} experts a token; the model has {shape.num_experts}.")
        own: Sequence[int] = range(shape.num_experts)
        self._places: ExpertPlaces | None = None
        self._exchange: ExpertExchange | None = None
        num_engines = 1
        if context.experts is not None:
            context.experts.layers.append(self)
        if context.experts is None or context.experts.group.size == 1:
            shard = context.shard(0, shape.size, "intermediate dimensions of an expert")
        else:
            shard = Shard(0, 0, shape.size)
            self._places = context.experts.place(shape.num_experts, context.device)
            self._exchange, num_engines = context.experts.exchange, context.experts.num_engines
            own = self._places.own
            context = replace(context, group=ParallelGroup())  # one rank has a whole expert, including its biases
        self.activation_size = num_engines * top_k * (3 * (shard.stop - shard.start) + 2 * shape.hidden_size)
        self._shape = shape
        self._top_k = top_k
        self._dtype = context.dtype
        self._device = context.device
        self._ops = context.ops
        self._activation = activation
        self._weighs_inputs = weighs_inputs
        self._has_any = len(own) > 0
        self._adapters = self._adapters_of(context, stored, shard, own)
        if self._has_any:
            try:
                self._packed = context.packing.experts(
                    lambda: (stored.read(context, shape, index, shard) for index in own), len(own)
                )
            except UnlikeExpertsError as error:
                raise ModelLoadError(
                    f"{error}. Take a checkpoint that quantizes all experts of a layer alike; layers may differ."
                ) from None

    def partial(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Runs `Backend.experts` with the rank's part of the experts. Summed over the engine's ranks, these are the
        outputs.

        If engines share the experts, the result includes the sum over other engines' ranks.
        """
        if self._places is not None:
            self._places.note(ids)
        if self._exchange is None:
            return self._of_own(x, ids, weights)
        tokens = self._exchange.dispatch(x, ids, weights, self.places)
        return self._exchange.combine(self._of_own(tokens.x, tokens.ids, tokens.weights), tokens)

    def run_dummy_step(self) -> None:
        """Runs `partial` for a rank without tokens: the rank's part of the experts for the tokens of other engines."""
        choices = (0, self._top_k)
        self.partial(
            torch.empty(0, self._shape.hidden_size, dtype=self._dtype, device=self._device),
            torch.empty(choices, dtype=torch.int64, device=self._device),
            torch.empty(choices, dtype=torch.float32, device=self._device),
        )

    def _of_own(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Computes the tokens with this rank's experts, or its parts of them."""
        if not (self._has_any and len(x)):  # there are more ranks than experts, or no token chose one here
            return torch.zeros_like(x)
        if self._places is not None:
            ids = self._places.local(x, ids)
        low_rank = None if self._adapters is None else self._adapters.of_step(x)
        call = ExpertCall(x, ids, weights, self._activation, self._weighs_inputs, low_rank)
        return self._ops.experts(self._packed, call)

    def _adapters_of(
        self, context: ModelContext, stored: StoredExperts, shard: Shard, own: Sequence[int]
    ) -> ExpertAdapters | None:
        """Returns the place of adapters; None: there are none, or experts or tokens move between ranks."""
        place = context.adapters
        moves = self._exchange is not None or (context.experts is not None and context.experts.is_balanced)
        if place is None or moves or not own:
            return None
        first, down = stored.parts(self._shape, own[0], shard)
        if not place.takes(*(part.name for part in (*first, down)), stored.mixture):
            return None
        return ExpertAdapters(context, place, stored, self._shape, own, shard)

    @property
    def adapters(self) -> Sequence[LayerAdapters]:
        """The experts' places of adapters."""
        return [] if self._adapters is None else self._adapters.layers

    @property
    def places(self) -> ExpertPlaces:
        """The places of the experts, if they are divided whole."""
        assert self._places is not None, "each rank has a part of each expert"
        return self._places

    def tensors(self, place: int) -> list[Tensor]:
        """Returns `Backend.expert_tensors` of the expert in one of this rank's places."""
        return self._ops.expert_tensors(self._packed, place)
