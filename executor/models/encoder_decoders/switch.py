"""Switch Transformers (arXiv:2101.03961): T5 with an expert for each token in some layers."""

from typing import Any

import torch
from torch import Tensor

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.attention.sequence import SequenceAttention
from quire.executor.layers.context import ModelContext
from quire.executor.layers.experts.experts import Experts
from quire.executor.layers.experts.mixture import read_router
from quire.executor.layers.experts.shape import ExpertShape
from quire.executor.layers.experts.stored import SeparateExperts
from quire.executor.layers.mlp import MLP
from quire.executor.layers.norm import Norm
from quire.executor.layers.step_context import StepContext
from quire.executor.models.decoder import FeedForward, activation_of, size_of
from quire.executor.models.encoder_decoders.t5 import T5ForConditionalGeneration
from quire.executor.models.encoders.encoder import EncoderLayer, PreNormLayer
from quire.executor.models.encoders.t5 import T5EncoderModel
from quire.executor.weights.rearranged import Piece
from quire.ops.routing import Routing


class _SwitchEncoder(T5EncoderModel):
    SIZES = ("d_ff", "num_experts", "expert_capacity")

    def mlp_pieces(self, spec: ModelSpec) -> dict[str, Piece]:
        return _pieces("layer.1")

    def layer(
        self,
        spec: ModelSpec,
        context: ModelContext,
        index: int,
        attention_norm: Norm,
        attention: SequenceAttention,
        mlp_norm: Norm,
    ) -> EncoderLayer:
        if not _has_experts(index, spec.num_layers, spec.hf_config.get("num_sparse_encoder_layers", 3)):
            mlp = _dense(spec, context, index)
            return PreNormLayer(context.ops, attention_norm, attention, mlp_norm, mlp)
        experts = _OneExpert(spec, context, index, "layer.1", capacity=size_of(spec, "expert_capacity"))
        return _ExpertLayer(context.ops, attention_norm, attention, mlp_norm, experts)


class SwitchTransformersForConditionalGeneration(T5ForConditionalGeneration):
    """An expert of the encoder takes `expert_capacity` tokens of a text, the first that choose it, and others pass by.

    A step of the decoder computes one token of a text, so its experts have room for all.
    """

    SIZES = _SwitchEncoder.SIZES
    ENCODER = _SwitchEncoder

    def mlp_pieces(self, spec: ModelSpec) -> dict[str, Piece]:
        return _pieces("layer.2")

    def mlp(self, spec: ModelSpec, context: ModelContext, index: int) -> FeedForward:
        if _has_experts(index, spec.num_layers, spec.hf_config.get("num_sparse_decoder_layers", 3)):
            return _OneExpert(spec, context, index, "layer.2")
        return _dense(spec, context, index)


class _ExpertLayer(PreNormLayer):
    """A layer whose experts know the places of tokens."""

    _mlp: "_OneExpert"

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        normed = x if self._attention_norm is None else self._attention_norm(x)
        x = self._ops.add(self._attention(normed, step), x)
        return self._ops.add(self._mlp.of_texts(self._mlp_norm(x), step.positions), x)


class _OneExpert:
    """Computes `p * expert(x)`, with the likeliest expert and its probability p.

    Attributes:
        activation_size: values that the layer computes for each token.
    """

    def __init__(
        self, spec: ModelSpec, context: ModelContext, index: int, place: str, *, capacity: int | None = None
    ) -> None:
        """Takes the `place` of the block in a stored layer, and the number of a text's tokens that an expert takes."""
        name = f"model.layers.{index}.{place}.mlp"
        shape = ExpertShape(size_of(spec, "num_experts"), spec.hidden_size, size_of(spec, "d_ff"))
        bias = spec.hf_config.get("router_bias", False)
        stored = SeparateExperts(f"{name}.experts.expert_{{}}", None, "wi", "wo")
        self._ops = context.ops
        self._group = context.group
        self._capacity = capacity
        self._num_experts = shape.num_experts
        self._router = read_router(context, f"{name}.router.classifier", Routing(1), shape, bias=bias)
        self._experts = Experts(context, stored, shape, 1, _activation(spec))
        self.activation_size = self._experts.activation_size

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden] → [num_tokens, hidden]."""
        ids, weights = self._ops.route(x, self._router)
        return self._group.all_reduce(self._experts.partial(x, ids, weights))

    def of_texts(self, x: Tensor, positions: Tensor) -> Tensor:
        """The same for whole texts, one after another; `positions` [num_tokens] are those of tokens in their texts."""
        assert self._capacity is not None, "only an encoder's experts have a capacity"
        ids, weights = self._ops.route(x, self._router)
        chosen = (ids == torch.arange(self._num_experts, device=ids.device)).int()
        counts = chosen.cumsum(0)
        starts = torch.arange(len(x), device=ids.device) - positions
        in_text = (counts - (counts - chosen)[starts]).gather(1, ids.long())
        weights = weights.masked_fill(in_text > self._capacity, 0)
        return self._group.all_reduce(self._experts.partial(x, ids, weights))


def _pieces(place: str) -> dict[str, Piece]:
    return {"mlp.up_proj": Piece(f"{place}.mlp.wi"), "mlp.down_proj": Piece(f"{place}.mlp.wo")}


def _has_experts(index: int, num_layers: int, num_sparse: int) -> bool:
    every = num_layers // num_sparse if num_sparse else num_layers
    return every > 0 and (index % every == 1 or every == 1)


def _dense(spec: ModelSpec, context: ModelContext, index: int) -> MLP:
    inner, name = size_of(spec, "d_ff"), f"model.layers.{index}.mlp"
    return MLP(context, name, spec.hidden_size, inner, _activation(spec), bias=False)


def _activation(spec: ModelSpec) -> Any:
    return activation_of(spec, "dense_act_fn", "relu")
