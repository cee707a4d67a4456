"""Command R (Cohere) and Command R7B, Command A (Cohere 2; arXiv:2504.00698)."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.attention.grouped_query import Attention, AttentionShape, LayerPlace, kv_head_shard
from quire.executor.layers.context import ModelContext
from quire.executor.layers.mlp import GatedMLP
from quire.executor.layers.norm import NormStyle
from quire.executor.layers.positions.rotary import RotaryEmbedding
from quire.executor.layers.step_context import StepContext
from quire.executor.models.blocks import ParallelLayer
from quire.executor.models.decoder import (
    Decoder,
    activation_of,
    attention_shape,
    layer_places,
    layer_windows,
    size_of,
    vocabulary_ends,
)
from quire.executor.weights.rearranged import Pairs, Piece, RearrangedWeights
from quire.ops.backend import AttentionForm


class CohereAttention(Attention):
    """Attention in which each head of queries and keys may have its own layer norm."""

    def __init__(
        self,
        context: ModelContext,
        place: LayerPlace,
        shape: AttentionShape,
        rotary: RotaryEmbedding | None,
        norm: NormStyle | None,
        **options: Any,
    ) -> None:
        super().__init__(context, place, shape, rotary, **options)
        self._head_norm: tuple[Tensor, float] | None = None
        if norm is None:
            return
        weights = []
        for name, num_heads in (("q", shape.num_heads), ("k", shape.num_kv_heads)):
            rows = kv_head_shard(context, num_heads, 1)
            stored = context.read(f"{place.name}.self_attn.{name}_norm.weight", (num_heads, shape.head_dim), rows)
            weights.append(
                stored.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1)
            )  # in the order of the projections' outputs
        self._head_norm = torch.cat(weights), norm.eps

    def _store(self, heads: Tensor, step: StepContext, pages: Tensor, slot_mapping: Tensor) -> Tensor:
        if self._head_norm is None:
            return super()._store(heads, step, pages, slot_mapping)
        weight, eps = self._head_norm
        normal = self._ops.layer_norm(heads[:, : len(weight)], weight, None, eps)
        rotated = self._ops.rotary(normal, *self._rotation(step))
        k, v = rotated[:, self._num_heads :], heads[:, len(weight) :]
        self._ops.write_kv(k, v, pages, slot_mapping, self._cache_scales)
        return rotated[:, : self._num_heads]


class CohereForCausalLM(Decoder):
    """Both blocks of a layer read the same layer norm, neighbouring elements are rotated, logits are scaled."""

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config, size = spec.hf_config, spec.hidden_size
        style = NormStyle(config["layer_norm_eps"], is_centred=True)
        pairs = Pairs(spec.head_dim, spec.head_dim)
        pieces = {f"self_attn.{name}_proj": Piece(f"self_attn.{name}_proj", pairs=pairs) for name in "qk"}
        context = replace(context, weights=RearrangedWeights(context.weights, pieces))
        rotary = RotaryEmbedding(context, config, spec.head_dim)
        windows = self.windows(spec)
        bias, activation = config["attention_bias"], activation_of(spec, "hidden_act")

        def layer(place: LayerPlace) -> ParallelLayer:
            window = windows[place.index]
            attention = CohereAttention(
                context, place, attention_shape(spec), rotary if self.is_rotated(window) else None,
                style if config.get("use_qk_norm") else None, qkv_bias=bias, output_bias=bias,
                form=AttentionForm(spec.head_dim**-0.5, window),
            )  # fmt: skip
            mlp = GatedMLP(context, f"{place.name}.mlp", size, size_of(spec, "intermediate_size"), activation)
            norm = style.layer(context, f"{place.name}.input_layernorm", size)
            return ParallelLayer(context.ops, attention, mlp, norm)

        is_tied, scale = config["tie_word_embeddings"], config["logit_scale"]
        embed, head = vocabulary_ends(spec, context, is_tied=is_tied, logit_scale=scale)
        layers = [layer(place) for place in layer_places(spec, context)]
        super().__init__(embed, layers, style.layer(context, "model.norm", size), head)

    def windows(self, spec: ModelSpec) -> list[int | None]:
        """Returns each layer's window."""
        return [None] * spec.num_layers

    def is_rotated(self, window: int | None) -> bool:
        """Returns True if layers with this window encode positions."""
        return True


class Cohere2ForCausalLM(CohereForCausalLM):
    """Three of four layers have a window; the others have no positions."""

    def windows(self, spec: ModelSpec) -> list[int | None]:
        """Returns each layer's window: from `layer_types`, or every `sliding_window_pattern`-th layer has none."""
        config, types = spec.hf_config, spec.hf_config.get("layer_types")
        if types is None:
            pattern = config.get("sliding_window_pattern", 4)
            types = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(spec.num_layers)]
        return layer_windows(types, config["sliding_window"], spec.num_layers)

    def is_rotated(self, window: int | None) -> bool:
        """Returns True if layers with this window encode positions."""
        return window is not None
