"""Gemma 4, text: wide heads on layers that see all tokens, per-layer embeddings, and experts parallel to the MLP."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.executor.layers.attention.grouped_query import AttentionShape, LayerPlace
from quire.executor.layers.attention.shared import SharedAttention, ValueNormAttention, sharing_places
from quire.executor.layers.context import ModelContext
from quire.executor.layers.experts.experts import Experts
from quire.executor.layers.experts.mixture import read_router
from quire.executor.layers.experts.shape import ExpertShape
from quire.executor.layers.experts.stored import FusedExperts, SeparateExperts, StoredExperts
from quire.executor.layers.mlp import GatedMLP
from quire.executor.layers.norm import NormStyle, RMSNorm
from quire.executor.layers.positions.rotary import RotaryEmbedding
from quire.executor.layers.residual_streams.per_layer_inputs import PerLayerBlock, PerLayerInputs
from quire.executor.layers.step_context import StepContext
from quire.executor.models.decoder import (
    SelfAttention,
    activation_of,
    hand_over,
    layer_windows,
    size_of,
    vocabulary_ends,
)
from quire.executor.models.dense.gemma2 import gemma_factor
from quire.executor.weights.quantization.schemes import is_gguf
from quire.executor.weights.rearranged import Piece, RearrangedWeights, fused
from quire.ops.backend import AttentionForm
from quire.ops.routing import Routing


class Gemma4Experts:
    """Experts in parallel with a layer's MLP. They and the router read the residual stream through different norms."""

    def __init__(self, spec: ModelSpec, context: ModelContext, name: str, style: NormStyle) -> None:
        size = spec.hidden_size
        shape = ExpertShape(size_of(spec, "num_experts"), size, size_of(spec, "moe_intermediate_size"))
        routing = Routing(size_of(spec, "top_k_experts"), renormalize=True)
        router = read_router(context, f"{name}.router.proj", routing, shape)
        scale = context.read(f"{name}.router.scale", (size,), dtype=torch.float32)
        shares = context.read(f"{name}.router.per_expert_scale", (shape.num_experts,), dtype=torch.float32)
        self._ops = context.ops
        self._group = context.group
        self._router = router._replace(weight=router.weight * (scale * size**-0.5), shares=shares)
        self._router_norm = (torch.ones(size, dtype=context.dtype, device=context.device), style.eps)
        self._before = RMSNorm(context, f"{name}.pre_feedforward_layernorm_2", size, style)
        self._after = RMSNorm(context, f"{name}.post_feedforward_layernorm_2", size, style)
        stored: StoredExperts = FusedExperts(f"{name}.experts.gate_up_proj", f"{name}.experts.down_proj")
        if is_gguf(spec):  # whose stacks are of whole layers, quantized
            stored = SeparateExperts(f"{name}.experts.{{}}")
            context = replace(context, weights=RearrangedWeights(context.weights, _expert_pieces(shape)))
        activation = activation_of(spec, "hidden_activation", "gelu_pytorch_tanh")
        self._experts = Experts(context, stored, shape, routing.top_k, activation)
        self.activation_size = self._experts.activation_size + 2 * size

    def __call__(self, x: Tensor) -> Tensor:
        """Maps `x` [num_tokens, hidden], the residual stream before the layer's MLP, to the same shape."""
        ids, weights = self._ops.route(self._ops.rms_norm(x, *self._router_norm), self._router)
        return self._after(self._group.all_reduce(self._experts.partial(self._before(x), ids, weights)))


def _expert_pieces(shape: ExpertShape) -> dict[str, Piece]:
    """Maps each expert's gate and up to pieces of one stored layer."""
    pieces: dict[str, Piece] = {}
    for index in range(shape.num_experts):
        gate, up = fused(f"experts.{index}.gate_up_proj", shape.size, shape.size)
        pieces |= {f"experts.{index}.gate_proj": gate, f"experts.{index}.up_proj": up}
    return pieces


class Gemma4Layer:
    """Both blocks have norms on both sides; a layer ends with its per-layer embedding and a factor."""

    def __init__(
        self, spec: ModelSpec, context: ModelContext, place: LayerPlace, attention: SelfAttention, ffn_size: int
    ) -> None:
        config, size, name, style = spec.hf_config, spec.hidden_size, place.name, _norm(spec)
        activation = activation_of(spec, "hidden_activation", "gelu_pytorch_tanh")

        def norm(what: str) -> RMSNorm:
            return RMSNorm(context, f"{name}.{what}_layernorm", size, style)

        self.attention = attention
        self.mlp = GatedMLP(context, f"{name}.mlp", size, ffn_size, activation)
        self._ops = context.ops
        self._before_attention, self._after_attention = norm("input"), norm("post_attention")
        self._before_mlp, self._after_mlp = norm("pre_feedforward"), norm("post_feedforward")
        self._experts: Gemma4Experts | None = None
        if config.get("enable_moe_block"):
            self._after_network = RMSNorm(context, f"{name}.post_feedforward_layernorm_1", size, style)
            self._experts = Gemma4Experts(spec, context, name, style)
        self._per_layer: PerLayerBlock | None = None
        if input_size := _input_size(spec):
            self._per_layer = PerLayerBlock(context, name, place.index, size, input_size, style, activation)
        factor = context.read(f"{name}.layer_scalar", (1,), dtype=torch.float32)
        self._factor = 1.0 if factor.is_meta else factor.item()
        self.activation_size = (
            attention.activation_size
            + self.mlp.activation_size
            + (self._experts.activation_size if self._experts else 0)
        )

    def __call__(self, x: Tensor, inputs: Tensor | None, step: StepContext) -> tuple[Tensor, Tensor | None]:
        """Takes `x` [num_tokens, hidden], and `inputs` as `PerLayerInputs` computes them, if the model has any.

        Returns both. The last layer with keys and values returns only those of the wanted tokens.
        """
        ops = self._ops
        attended = self._after_attention(self.attention(self._before_attention(x), step))
        x = ops.add(self.attention.outputs_of(x, step), attended)
        added = self.mlp(self._before_mlp(x))
        if self._experts is not None:
            added = ops.add(self._after_network(added), self._experts(x))
        x = ops.add(x, self._after_mlp(added))
        if self._per_layer is not None and inputs is not None:
            inputs = self.attention.outputs_of(inputs, step)
            x = ops.add(x, self._per_layer(x, inputs))
        return ops.scale(x, self._factor), inputs


class Gemma4ForCausalLM:
    """The last layers may share keys and values. Implements `quire.executor.models.base.StagedModel`."""

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config, size, style = spec.hf_config, spec.hidden_size, _norm(spec)
        if config.get("use_bidirectional_attention") == "all":
            raise ModelLoadError(
                f"{spec.name}: its tokens see later ones (use_bidirectional_attention 'all'), as for embeddings: it "
                "is no model that generates text. Set it to null if it is one."
            )
        types = _layer_types(config, spec.num_layers)
        windows = layer_windows(types, config["sliding_window"], spec.num_layers)
        config = {"rope_parameters": _ROTATIONS, **{name: value for name, value in config.items() if value is not None}}
        shapes = [_shape(spec, index, kind) for index, kind in enumerate(types[: spec.num_layers])]
        rotaries = {
            kind: RotaryEmbedding(context, config, shapes[types.index(kind)].head_dim, layer_type=kind)
            for kind in set(types[: spec.num_layers])
        }
        alike = replace(
            context, weights=RearrangedWeights(context.weights, {"self_attn.v_proj": Piece("self_attn.k_proj")})
        )  # for layers whose values are the keys before their norms
        num_shared, bias = config["num_kv_shared_layers"], config["attention_bias"]

        def layer(place: LayerPlace) -> Gemma4Layer:
            kind, shape = types[place.index], shapes[place.index]
            rotary, form = rotaries[kind], AttentionForm(1.0, windows[place.index])
            is_shared = place.index >= spec.num_layers - num_shared
            attention: SelfAttention
            if is_shared:
                attention = SharedAttention(context, place, shape, rotary, form=form, q_norm=style, bias=bias)
            else:
                own = alike if config.get("attention_k_eq_v") and kind == "full_attention" else context
                attention = ValueNormAttention(own, place, shape, rotary, style, form=form, bias=bias)
            is_wide = is_shared and config["use_double_wide_mlp"]
            return Gemma4Layer(spec, context, place, attention, size_of(spec, "intermediate_size") * (1 + is_wide))

        places = sharing_places(context, types, spec.num_layers, num_shared)
        self._layers = [layer(place) for place in places]
        self._embed, self._head = vocabulary_ends(
            spec, context, is_tied=config["tie_word_embeddings"], scale=gemma_factor(spec, context),
            softcap=config.get("final_logit_softcapping"),
        )  # fmt: skip
        self._inputs: PerLayerInputs | None = None
        input_size = _input_size(spec)
        self._inputs_size = spec.num_layers * input_size
        if input_size and context.is_first_stage:
            self._inputs = PerLayerInputs(
                context, style, hidden_size=size, size=input_size, num_layers=spec.num_layers,
                vocab_size=spec.vocab_size, table_size=config.get("vocab_size_per_layer_input", spec.vocab_size),
            )  # fmt: skip
        self._norm = RMSNorm(context, "model.norm", size, style)
        self.kv_layers = [kv for layer in self._layers if (kv := layer.attention.kv) is not None]
        self.state_layers = ()
        self.activation_size = max(layer.activation_size for layer in self._layers)
        self.activation_size += self._inputs_size
        self.num_layer_outputs = len(self._layers)

    def forward(self, token_ids: Tensor, step: StepContext) -> Tensor:
        inputs: Tensor | None
        if step.received is None:
            x = self._embed(token_ids, step)
            inputs = None if self._inputs is None else self._inputs(token_ids, x, step)
        else:
            num_inputs = len(token_ids) * self._inputs_size
            inputs = step.received[:num_inputs].view(len(token_ids), -1) if num_inputs else None
            x = step.received[num_inputs:].view(len(token_ids), -1)
        for index, layer in enumerate(self._layers):
            x, inputs = layer(x, inputs, step)
            if step.taps is not None:
                step.taps.see(index, x, None)
        if step.hands_over:
            return x.flatten() if inputs is None else hand_over(inputs, x)
        return self._norm(x)

    def handover_size(self, hidden_size: int) -> int:
        """Counts the layers' inputs and the residual stream."""
        return self._inputs_size + hidden_size

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._head(hidden)


_ROTATIONS = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


def _norm(spec: ModelSpec) -> NormStyle:
    return NormStyle(spec.hf_config["rms_norm_eps"], is_wide=True)


def _input_size(spec: ModelSpec) -> int:
    """Returns the size of a per-layer embedding; 0: there is none, as in the unified models."""
    default = 0 if spec.architecture.startswith("Gemma4Unified") else 256
    return spec.hf_config.get("hidden_size_per_layer_input", default) or 0


def _layer_types(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """Returns `layer_types`, or the default: every sixth layer sees all tokens, and the last one."""
    types = ["full_attention" if index % 6 == 5 else "sliding_attention" for index in range(num_layers)]
    return config.get("layer_types") or [*types[:-1], "full_attention"]


def _shape(spec: ModelSpec, index: int, kind: str) -> AttentionShape:
    """Returns a layer's sizes: those of `per_layer_config`, or the global ones for layers that see all tokens."""
    config, own = spec.hf_config, {}
    if config.get("per_layer_config") is not None:
        own = config["per_layer_config"].get(str(index), {})
    elif kind == "full_attention":
        own = {"head_dim": config.get("global_head_dim") or 512}
        if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads"):
            own["num_key_value_heads"] = config["num_global_key_value_heads"]
    return AttentionShape(
        spec.hidden_size, spec.num_attention_heads, own.get("num_key_value_heads", spec.num_kv_heads),
        own.get("head_dim", spec.head_dim),
    )  # fmt: skip
