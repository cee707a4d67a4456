"""Mixture of experts as a block of a decoder's layer (arXiv:1701.06538, 2401.06066)."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from quire.executor.layers.context import ModelContext
from quire.executor.layers.experts.experts import Experts
from quire.executor.layers.experts.shape import ExpertShape
from quire.executor.layers.experts.stored import StoredExperts
from quire.ops.activations import Activation
from quire.ops.routing import ExpertRouter, Routing


class PartialLayer(Protocol):
    """A feed-forward layer that is split over ranks."""

    activation_size: int

    def partial(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden] → [num_tokens, hidden]: summed over ranks, these are the layer's outputs."""
        ...


class RoutedExperts:
    """Experts that a router selects for each token. With a single expert, the router computes its weight."""

    def __init__(
        self,
        context: ModelContext,
        router: str,
        routing: Routing,
        stored: StoredExperts,
        shape: ExpertShape,
        activation: Activation = "silu",
        *,
        bias: bool = False,
        correction: str | Tensor | None = None,
        weighs_inputs: bool = False,
    ) -> None:
        """Takes as `router` the name of a linear layer, with a `bias` or not; `correction` is a tensor or its name.

        `weighs_inputs` as for `Backend.experts`.
        """
        self._ops = context.ops
        routing = routing._replace(renormalize=bool(routing.renormalize))  # config.json may have null
        self._router = read_router(context, router, routing, shape, bias=bias, correction=correction)
        self._experts = Experts(context, stored, shape, routing.top_k, activation, weighs_inputs=weighs_inputs)
        self.activation_size = self._experts.activation_size

    def partial(self, x: Tensor) -> Tensor:
        ids, weights = self._ops.route(x, self._router)
        return self._experts.partial(x, ids, weights)


class Mixture:
    """The sum of several layers, such as routed and shared experts."""

    def __init__(self, context: ModelContext, layers: Sequence[PartialLayer]) -> None:
        self.activation_size = sum(layer.activation_size for layer in layers)
        self._ops = context.ops
        self._group = context.group
        self._layers = layers

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden] → [num_tokens, hidden]."""
        first, *others = self._layers
        total = first.partial(x)
        for layer in others:
            total = self._ops.add(layer.partial(x), total)
        return self._group.all_reduce(total)


def read_router(
    context: ModelContext,
    name: str,
    routing: Routing,
    shape: ExpertShape,
    *,
    bias: bool = False,
    correction: str | Tensor | None = None,
) -> ExpertRouter:
    """Reads a router in float32, because rounding of scores may change the selected experts."""

    def read(tensor: str, *size: int) -> Tensor:
        return context.read(tensor, size, dtype=torch.float32)

    return ExpertRouter(
        routing,
        read(f"{name}.weight", shape.num_experts, shape.hidden_size),
        read(f"{name}.bias", shape.num_experts) if bias else None,
        read(correction, shape.num_experts) if isinstance(correction, str) else correction,
    )
