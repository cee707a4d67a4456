"""Granite 4, hybrid: Mamba 2 mixers and attention, with Granite's multipliers and mixtures of experts."""

from dataclasses import replace

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.attention.grouped_query import Attention, LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.experts.mixture import Mixture, RoutedExperts
from quire.executor.layers.experts.shape import ExpertShape
from quire.executor.layers.mlp import GatedMLP
from quire.executor.layers.positions.rotary import RotaryEmbedding
from quire.executor.layers.recurrent.mamba2 import Mamba2Mixer
from quire.executor.models.decoder import FeedForward, activation_of, attention_shape, size_of, vocabulary_ends
from quire.executor.models.hybrid.bamba import mamba2_shape
from quire.executor.models.hybrid_decoder import PairedDecoder, layer_kinds, places_by_kind
from quire.executor.models.mixtures.granite_moe import granite_experts
from quire.executor.weights.quantization.schemes import is_gguf
from quire.executor.weights.rearranged import Piece, RearrangedWeights, fused
from quire.ops.backend import AttentionForm
from quire.ops.routing import Routing


class GraniteMoeHybridForCausalLM(PairedDecoder):
    """Positions are rotated only if `position_embedding_type` is "rope"; without experts the model is dense."""

    SIZES = ("intermediate_size", "shared_intermediate_size", "max_position_embeddings")

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config, shape = spec.hf_config, mamba2_shape(spec)
        context = replace(context, weights=RearrangedWeights(context.weights, _pieces(spec)))
        rotary = None
        if config.get("position_embedding_type") == "rope":
            rotary = RotaryEmbedding(context, config, spec.head_dim)
        form, bias = AttentionForm(config["attention_multiplier"]), config["attention_bias"]
        kinds = layer_kinds(config.get("layer_types") or ["mamba"] * spec.num_layers, spec)

        def mixer(place: LayerPlace) -> Attention | Mamba2Mixer:
            if kinds[place.index] == "recurrent":
                return Mamba2Mixer(context, place, shape, f"{place.name}.mamba")
            return Attention(
                context, place, attention_shape(spec), rotary, qkv_bias=bias, output_bias=bias, form=form
            )  # fmt: skip

        super().__init__(
            spec, context, places_by_kind(context, kinds), mixer, lambda place: _feed_forward(spec, context, place),
            vocabulary_ends(
                spec, context, is_tied=config["tie_word_embeddings"],
                scale=config["embedding_multiplier"], logit_scale=1 / config["logits_scaling"],
            ),
            multiplier=config["residual_multiplier"],
        )  # fmt: skip


def _pieces(spec: ModelSpec) -> dict[str, Piece]:
    """Maps the shared MLP, stored as one layer. GGUF files have its parts, named as a dense MLP if there are no
    experts.
    """
    if is_gguf(spec):
        name = "mlp.shared_expert" if spec.hf_config.get("num_local_experts") else "mlp"
        return {f"shared_mlp.{part}_proj": Piece(f"{name}.{part}_proj") for part in ("gate", "up", "down")}
    gate, up = fused("shared_mlp.input_linear", *[size_of(spec, "shared_intermediate_size")] * 2)
    down = Piece("shared_mlp.output_linear")
    return {"shared_mlp.gate_proj": gate, "shared_mlp.up_proj": up, "shared_mlp.down_proj": down}


def _feed_forward(spec: ModelSpec, context: ModelContext, place: LayerPlace) -> FeedForward:
    """Builds the MLP that all tokens share, and the routed experts, if there are any."""
    activation, num_experts = activation_of(spec, "hidden_act"), spec.hf_config["num_local_experts"]
    shared_size = size_of(spec, "shared_intermediate_size")
    shared = GatedMLP(context, f"{place.name}.shared_mlp", spec.hidden_size, shared_size, activation)
    if not num_experts:
        return shared
    name = f"{place.name}.block_sparse_moe"
    experts = RoutedExperts(
        context, f"{name}.router.layer", Routing(spec.hf_config["num_experts_per_tok"], renormalize=True),
        granite_experts(spec, name),
        ExpertShape(num_experts, spec.hidden_size, size_of(spec, "intermediate_size")), activation,
    )  # fmt: skip
    return Mixture(context, [experts, shared])
