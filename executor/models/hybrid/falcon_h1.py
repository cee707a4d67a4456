"""Falcon-H1 (arXiv:2507.22448): in every layer, attention and a Mamba 2 mixer side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.attention.grouped_query import Attention
from quire.executor.layers.context import ModelContext
from quire.executor.layers.mlp import GatedMLP
from quire.executor.layers.norm import Norm
from quire.executor.layers.positions.rotary import RotaryEmbedding
from quire.executor.layers.recurrent.base import RecurrentLayer
from quire.executor.layers.recurrent.mamba2 import Mamba2Mixer, Mamba2Shape
from quire.executor.layers.step_context import StepContext
from quire.executor.models.decoder import activation_of, attention_shape, layer_places, norm_style, vocabulary_ends
from quire.executor.models.hybrid.bamba import mamba2_shape
from quire.executor.models.hybrid_decoder import Block, FeedForwardBlock, HybridDecoder, MixerBlock
from quire.executor.weights.quantization.scheme import LinearPart, LinearScheme
from quire.executor.weights.readers import Shard, TensorSource, WeightReader
from quire.ops.backend import Backend
from quire.ops.linear import LinearWeight


class FalconH1ForCausalLM(HybridDecoder):
    """config.json's multipliers become part of the weights at load."""

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config, size = spec.hf_config, spec.hidden_size
        has_norm = config["mamba_rms_norm"]
        shape = mamba2_shape(
            spec, norm_eps=norm_style(spec).eps if has_norm else None,
            is_gate_first=not config["mamba_norm_before_gate"],
            output_bias=config["projectors_bias"],
        )  # fmt: skip
        multipliers = _multipliers(spec, shape)
        context = replace(
            context,
            weights=_MultipliedBiases(context.weights, multipliers),
            scheme=_MultipliedScheme(context.scheme, multipliers),
        )
        rotary = RotaryEmbedding(context, config, spec.head_dim)
        bias, activation = config["attention_bias"], activation_of(spec, "hidden_act")

        def norm(name: str) -> Norm:
            return norm_style(spec).layer(context, name, size)

        mixers: list[Attention | RecurrentLayer] = []
        blocks: list[Block] = []
        for place in layer_places(spec, context):
            attention = Attention(context, place, attention_shape(spec), rotary, qkv_bias=bias, output_bias=bias)
            mamba = Mamba2Mixer(context, place, shape, f"{place.name}.mamba")
            mlp = GatedMLP(
                context, f"{place.name}.feed_forward", size, config["intermediate_size"], activation,
                bias=config["mlp_bias"],
            )  # fmt: skip
            mixers += [attention, mamba]
            both = _SideBySide(context.ops, attention, mamba)
            blocks.append(MixerBlock(norm(f"{place.name}.input_layernorm"), both))
            blocks.append(FeedForwardBlock(norm(f"{place.name}.pre_ff_layernorm"), mlp))
        embed, head = vocabulary_ends(
            spec, context, is_tied=config["tie_word_embeddings"],
            scale=config["embedding_multiplier"], logit_scale=config["lm_head_multiplier"],
        )  # fmt: skip
        super().__init__(embed, blocks, norm("model.final_layernorm"), head, mixers, ends=range(1, len(blocks), 2))


class _SideBySide:
    """The sum of two mixers of the same input."""

    def __init__(self, ops: Backend, attention: Attention, mamba: Mamba2Mixer) -> None:
        self._ops = ops
        self._attention = attention
        self._mamba = mamba
        self.activation_size = attention.activation_size + mamba.activation_size

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        return self._ops.add(self._mamba(x, step), self._attention(x, step))

    def outputs_of(self, rows: Tensor, step: StepContext) -> Tensor:
        return self._attention.outputs_of(rows, step)


class _Multiplier(NamedTuple):
    """The factors of a linear layer's inputs, and of its outputs: by sections, each (its end, its factor)."""

    inputs: float
    outputs: Sequence[tuple[float, float]]

    def output_factor(self, output: int) -> float:
        """Returns the factor of one of the outputs."""
        return next(factor for end, factor in self.outputs if output < end)


def _whole(inputs: float, outputs: float) -> _Multiplier:
    return _Multiplier(inputs, [(float("inf"), outputs)])


def _multipliers(spec: ModelSpec, shape: Mamba2Shape) -> dict[str, _Multiplier]:
    """Maps the name of a layer within its decoder layer to its factors."""
    config = spec.hf_config
    gate, down = config.get("mlp_multipliers") or (1.0, 1.0)
    into, out = config["attention_in_multiplier"], config["attention_out_multiplier"]
    groups_size, ends = shape.num_groups * shape.state_size, [0]
    for section in (shape.inner_size, shape.inner_size, groups_size, groups_size, shape.num_heads):
        ends.append(ends[-1] + section)
    sections = list(zip(ends[1:], config.get("ssm_multipliers") or [1.0] * 5, strict=True))
    return {
        "self_attn.q_proj": _whole(into, 1.0),
        "self_attn.k_proj": _whole(into, config["key_multiplier"]),
        "self_attn.v_proj": _whole(into, 1.0),
        "self_attn.o_proj": _whole(1.0, out),
        "mamba.in_proj": _Multiplier(config["ssm_in_multiplier"], sections),
        "mamba.out_proj": _whole(1.0, config["ssm_out_multiplier"]),
        "feed_forward.gate_proj": _whole(1.0, gate),
        "feed_forward.down_proj": _whole(1.0, down),
    }


def _linear(multipliers: Mapping[str, _Multiplier], layer: str) -> _Multiplier:
    inner = layer.split(".", 3)[-1]  # after model.layers.0
    return multipliers.get(inner, _whole(1.0, 1.0))


class _MultipliedScheme:
    """Multiplies the weights that another scheme reads. A part of a layer with several sections lies in one of them."""

    def __init__(self, scheme: LinearScheme, multipliers: Mapping[str, _Multiplier]) -> None:
        self._scheme = scheme
        self._multipliers = multipliers
        # These are for layers without multipliers.
        self.read_rows, self.for_head, self.read_dequantized = (
            scheme.read_rows,
            scheme.for_head,
            scheme.read_dequantized,
        )

    def read_weight(self, source: TensorSource, part: LinearPart, in_features: int) -> LinearWeight:
        weight = self._scheme.read_weight(source, part, in_features)
        factors = self._factors(part).unsqueeze(1)
        if isinstance(weight, Tensor):
            return weight.mul_(factors.to(weight.device))
        factors = factors.to(weight.scales.device)  # in float32, because smaller scales may underflow in float16
        offsets = None if weight.offsets is None else weight.offsets * factors
        return weight._replace(scales=weight.scales * factors, offsets=offsets)

    def _factors(self, part: LinearPart) -> Tensor:
        """Returns the factor of each of the part's outputs, float32."""
        first, last = part.shard[1:] if part.shard.dim == 0 else (0, part.out_features)
        found = _linear(self._multipliers, part.name)
        return torch.full((last - first,), found.inputs * found.output_factor(first))


class _MultipliedBiases:
    def __init__(self, reader: WeightReader, multipliers: Mapping[str, _Multiplier]) -> None:
        self._reader = reader
        self._multipliers = multipliers
        self.find, self.locate, self.are_same, self.close = reader.find, reader.locate, reader.are_same, reader.close

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]] | None:
        return self._reader.shapes

    def read(
        self, name: str, shape: tuple[int, ...], shard: Shard | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        tensor, (layer, _, kind) = self._reader.read(name, shape, shard, dtype), name.rpartition(".")
        if kind != "bias":
            return tensor
        return tensor.mul_(_linear(self._multipliers, layer).output_factor(0 if shard is None else shard.start))
