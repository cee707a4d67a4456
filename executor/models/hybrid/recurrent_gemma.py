"""RecurrentGemma (arXiv:2404.07839): two recurrent blocks of Griffin, then attention with a window."""

from dataclasses import replace

import torch

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.attention.grouped_query import Attention, LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.mlp import GatedMLP
from quire.executor.layers.norm import NormStyle
from quire.executor.layers.positions.rotary import RotaryEmbedding
from quire.executor.layers.recurrent.rg_lru import RecurrentUnit
from quire.executor.models.decoder import FeedForward, activation_of, attention_shape, size_of, vocabulary_ends
from quire.executor.models.hybrid_decoder import PairedDecoder, layer_kinds, places_by_kind
from quire.executor.weights.rearranged import Piece, RearrangedWeights
from quire.ops.backend import AttentionForm

_NAMES = {"recurrent": "linear_attention", "sliding_attention": "attention"}


class RecurrentGemmaForCausalLM(PairedDecoder):
    """Norms store the weight minus 1; the embedding's factor is rounded to bfloat16, also with other dtypes."""

    SIZES = ("intermediate_size",)

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config, size = spec.hf_config, spec.hidden_size
        pieces = {f"self_attn.{part}_proj": Piece(f"temporal_block.{part}_proj") for part in "qkvo"}
        context = replace(context, weights=RearrangedWeights(context.weights, pieces))
        pattern = config.get("layer_types") or config.get("block_types") or ["recurrent", "recurrent", "attention"]
        names = [_NAMES.get(name, name) for name in pattern] * spec.num_layers
        kinds = layer_kinds(names[: spec.num_layers], spec)
        rotary = RotaryEmbedding(context, {"partial_rotary_factor": 0.5, **config}, spec.head_dim)
        window = config.get("attention_window_size") or config.get("sliding_window") or 2048
        form = AttentionForm(spec.head_dim**-0.5, window)
        bias, activation = config["attention_bias"], activation_of(spec, "hidden_activation")

        def mixer(place: LayerPlace) -> Attention | RecurrentUnit:
            if kinds[place.index] == "recurrent":
                return RecurrentUnit(
                    context, place, f"{place.name}.temporal_block", hidden_size=size,
                    channels=config.get("lru_width") or size, num_heads=spec.num_attention_heads,
                    conv_width=config["conv1d_width"], activation=activation,
                )  # fmt: skip
            return Attention(
                context, place, attention_shape(spec), rotary, qkv_bias=bias, output_bias=True, form=form
            )  # fmt: skip

        def feed_forward(place: LayerPlace) -> FeedForward:
            inner = size_of(spec, "intermediate_size") // 2
            return GatedMLP(context, f"{place.name}.mlp_block", size, inner, activation, bias=True)

        ends = vocabulary_ends(
            spec, context, is_tied=config["tie_word_embeddings"],
            scale=torch.tensor(size**0.5, dtype=torch.bfloat16).item(), softcap=config["logits_soft_cap"],
        )  # fmt: skip
        super().__init__(
            spec, context, places_by_kind(context, kinds), mixer, feed_forward, ends,
            norm=NormStyle(config["rms_norm_eps"], is_offset=True),
            norm_names=("temporal_pre_norm", "channel_pre_norm"), final_norm="final_norm",
        )  # fmt: skip
