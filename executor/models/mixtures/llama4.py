"""Llama 4, text: most layers see a chunk, the others no positions; mixtures of one routed and one shared expert."""

from dataclasses import replace

import torch
from torch import Tensor

from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.executor.layers.attention.grouped_query import Attention, LayerPlace
from quire.executor.layers.attention.query_temperature import QueryTemperature, query_temperature
from quire.executor.layers.context import ModelContext
from quire.executor.layers.experts.mixture import Mixture, RoutedExperts
from quire.executor.layers.experts.shape import ExpertShape
from quire.executor.layers.experts.stored import stored_experts
from quire.executor.layers.mlp import GatedMLP
from quire.executor.layers.positions.rotary import RotaryEmbedding
from quire.executor.layers.step_context import StepContext
from quire.executor.models.decoder import FeedForward, PreNormDecoder, activation_of, attention_shape, size_of
from quire.executor.weights.rearranged import Pairs, Piece, RearrangedWeights
from quire.ops.backend import AttentionForm
from quire.ops.routing import Routing


class Llama4Attention(Attention):
    """Rotated queries and keys may be normalized, without a weight; others may have a temperature by position."""

    def __init__(
        self, context: ModelContext, place: LayerPlace, spec: ModelSpec, rotary: RotaryEmbedding | None,
        *, chunk: int | None,
    ) -> None:  # fmt: skip
        config, shape, bias = spec.hf_config, attention_shape(spec), spec.hf_config["attention_bias"]
        form = AttentionForm(spec.head_dim**-0.5, chunk=chunk)
        super().__init__(context, place, shape, rotary, qkv_bias=bias, output_bias=bias, form=form)
        if rotary is not None and config["use_qk_norm"]:
            # A rotation multiplies the length of a head by its scale, for which the norm before it compensates.
            shape_of_heads = (self._num_heads + self.kv.num_kv_heads, spec.head_dim)
            weight = torch.full(shape_of_heads, 1 / rotary.scale, dtype=context.dtype, device=context.device)
            self._qk_norm = (weight, config["rms_norm_eps"] / rotary.scale**2)
        self._temperature: QueryTemperature | None = None
        if rotary is None and config["attn_temperature_tuning"]:
            beta, period = config["attn_scale"], config["floor_scale"]
            self._temperature = query_temperature(context, beta, period, first=1)

    def _store(self, heads: Tensor, step: StepContext, pages: Tensor, slot_mapping: Tensor) -> Tensor:
        q = super()._store(heads, step, pages, slot_mapping)
        return q if self._temperature is None else self._temperature(self._ops, q, step)


class Llama4ForCausalLM(PreNormDecoder):
    """Neighbouring elements of a head are rotated; the score of a routed expert multiplies its input."""

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config = spec.hf_config
        pairs = Pairs(spec.head_dim, spec.head_dim)
        pieces = {f"self_attn.{name}_proj": Piece(f"self_attn.{name}_proj", pairs=pairs) for name in "qk"}
        context = replace(context, weights=RearrangedWeights(context.weights, pieces))
        rotary = RotaryEmbedding(context, config, spec.head_dim)
        interval = config.get("no_rope_layer_interval") or 4
        rotated = config.get("no_rope_layers") or [(index + 1) % interval for index in range(spec.num_layers)]
        types = config.get("layer_types") or ["chunked_attention" if is_in else "full_attention" for is_in in rotated]
        _check(spec, types, rotated)

        def attention(place: LayerPlace) -> Llama4Attention:
            chunk = config.get("attention_chunk_size") if types[place.index] == "chunked_attention" else None
            return Llama4Attention(context, place, spec, rotary if rotated[place.index] else None, chunk=chunk)

        step = config["interleave_moe_layer_step"]
        sparse = config.get("moe_layers")
        sparse = range(step - 1, spec.num_layers, step) if sparse is None else sparse
        size, activation = spec.hidden_size, activation_of(spec, "hidden_act")
        expert_size = size_of(spec, "intermediate_size")

        def feed_forward(place: LayerPlace) -> FeedForward:
            name = f"{place.name}.feed_forward"
            if place.index not in sparse:
                return GatedMLP(context, name, size, size_of(spec, "intermediate_size_mlp"), activation)
            shape = ExpertShape(size_of(spec, "num_local_experts"), size, expert_size)
            stored = stored_experts(context, f"{name}.experts", is_transposed=True)
            routing = Routing(size_of(spec, "num_experts_per_tok"), "sigmoid")
            routed = RoutedExperts(
                context, f"{name}.router", routing, stored, shape, activation, weighs_inputs=True
            )  # fmt: skip
            shared = GatedMLP(context, f"{name}.shared_expert", size, expert_size, activation)
            return Mixture(context, [routed, shared])

        super().__init__(spec, context, attention, feed_forward)


def _check(spec: ModelSpec, types: list[str], rotated: list[int]) -> None:
    """Raises ModelLoadError: other types than chunked_attention and full_attention, or too few of them."""
    unknown = sorted(set(types) - {"chunked_attention", "full_attention"})
    if unknown or min(len(types), len(rotated)) < spec.num_layers:
        raise ModelLoadError(
            f"config.json: layer_types must name chunked_attention or full_attention, and no_rope_layers hold 0 or 1, "
            f"for each of {spec.num_layers} layers; they have {len(types)} and {len(rotated)} entries"
            f"{f' with {unknown}' if unknown else ''}."
        )
