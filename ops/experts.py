"""Mixtures of experts (arXiv:1701.06538): the weights of experts, routers, and the experts that tokens chose."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from quire.ops.activations import Activation
from quire.ops.linear import LinearWeight, LowRankWeights
from quire.ops.quantized import QuantizedWeight
from quire.ops.routing import ExpertRouter

PackedExperts = TypeVar("PackedExperts")
"""A layer's experts in the backend's layout: from `pack_experts`, for `experts`."""


class ExpertWeights(NamedTuple):
    """The two linear layers of one expert (arXiv:1701.06538, 2002.05202). All experts of a layer have one form.

    Attributes:
        gate_up: [2 * size, hidden]: gates, then ups; or [size, hidden], without gates, or with only the gates.
        down: [hidden, size].
        gate_up_bias: one value an output, gates first; or None.
        down_bias: [hidden], or None.
        up: [size, hidden]: the ups, if they have another form than the gates; else None.
    """

    gate_up: LinearWeight
    down: LinearWeight
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    up: LinearWeight | None = None

    @property
    def is_gated(self) -> bool:
        """True if the activation has gates and ups."""
        return self.up is not None or self.gate_up.shape[0] != self.down.shape[1]

    @property
    def biases(self) -> tuple[Tensor | None, Tensor | None]:
        """The biases of `gate_up` and `up`."""
        if self.up is None or self.gate_up_bias is None:
            return self.gate_up_bias, None
        gate, up = self.gate_up_bias.chunk(2)
        return gate, up


class UnlikeExpertsError(ValueError):
    """Experts of one layer differ in form, so there is no packed form for them."""


class LowRankExperts(NamedTuple):
    """Low-rank weights that adapters add to those of experts.

    Attributes:
        gate_up, down: of both layers of the experts, without factors. Adapter n's weights for expert e have number
            n * num_experts + e. `gate_up` is two layers, or one for experts without gates.
        adapters: [num_tokens] int64, each token's adapter, or -1 for none.
    """

    gate_up: LowRankWeights
    down: LowRankWeights
    adapters: Tensor


class ExpertCall(NamedTuple):
    """A step's tokens and the experts of a layer that they chose: the arguments of `ExpertOperations.experts`.

    Attributes:
        x: [num_tokens, hidden], of a float type.
        ids: [num_tokens, top_k] int64, below the number of experts, or -1 for an expert of another rank, which adds
            nothing.
        weights: [num_tokens, top_k] float32, the factors of the experts.
        activation: of gates and ups; a plain one for experts without gates.
        weighs_inputs: the weights multiply an expert's input instead of its output.
        low_rank: what adapters add to the experts' weights.
    """

    x: Tensor
    ids: Tensor
    weights: Tensor
    activation: Activation = "silu"
    weighs_inputs: bool = False
    low_rank: LowRankExperts | None = None


class ExpertOperations(ABC, Generic[PackedExperts]):
    """Mixtures of experts on one kind of device."""

    @abstractmethod
    def route(self, x: Tensor, router: ExpertRouter) -> tuple[Tensor, Tensor]:
        """Selects the experts of each token of `x` [num_tokens, hidden], and their weights; computed in float32.

        Returns ids [num_tokens, top_k] int64, the best first, and weights [num_tokens, top_k] float32.
        """

    @abstractmethod
    def pack_experts(self, experts: Iterable[ExpertWeights], num_experts: int) -> PackedExperts:
        """Packs all experts of a layer in the backend's layout. They are read one by one, and all have the same shapes.

        Tensors on torch's meta device are packed as in `pack_linear`.

        Raises:
            UnlikeExpertsError: they differ in form: in the dtypes and shapes of their tensors.
        """

    @abstractmethod
    def expert_tensors(self, packed: PackedExperts, index: int) -> list[Tensor]:
        """Returns the memory of one expert. Writing another expert's bytes there replaces the expert.

        All experts of a layer have tensors of the same shapes, in the same order.
        """

    @abstractmethod
    def experts(self, packed: PackedExperts, call: ExpertCall) -> Tensor:
        """Sums the weighted outputs of each token's experts: the shape and dtype of `call.x`.

        An expert is a gated layer, or a linear layer with a plain activation, and the linear layer after it. The terms
        of a token are summed in the order of its ids.
        """


def alike(experts: Iterable[ExpertWeights]) -> Iterator[ExpertWeights]:
    """Yields the experts one by one.

    Raises:
        UnlikeExpertsError: one has tensors of other dtypes or shapes than the first, or codes of other values.
    """
    form: tuple[object, ...] | None = None
    tables: list[Tensor] = []  # of the first expert, whose other tensors are dropped
    for index, expert in enumerate(experts):
        if form is None:
            form, tables = _form(expert), _tables(expert)
        if _form(expert) != form or not all(map(_are_equal, _tables(expert), tables)):
            raise UnlikeExpertsError(f"experts 0 and {index} of a layer are stored in different ways")
        yield expert


def _form(part: LinearWeight | ExpertWeights | bool | None) -> tuple[object, ...]:
    if isinstance(part, Tensor):
        return part.dtype, part.shape
    return tuple(map(_form, part)) if isinstance(part, tuple) else (part,)


def _tables(expert: ExpertWeights) -> list[Tensor]:
    return [part.table for part in expert if isinstance(part, QuantizedWeight) and part.table is not None]


def _are_equal(table: Tensor, other: Tensor) -> bool:
    return table is other or table.is_meta or torch.equal(table, other)
