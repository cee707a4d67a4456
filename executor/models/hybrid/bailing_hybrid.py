"""Ling 3.0: Kimi Delta Attention in most layers, gated latent attention in the others, and DeepSeek V3's experts."""

from dataclasses import replace

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.attention.grouped_query import LayerPlace
from quire.executor.layers.attention.latent import LatentAttention
from quire.executor.layers.context import ModelContext
from quire.executor.layers.recurrent.kimi_delta import KimiDeltaAttention, KimiDeltaShape
from quire.executor.models.decoder import norm_style, vocabulary_ends
from quire.executor.models.hybrid.kimi_linear import in_terms_of_deepseek
from quire.executor.models.hybrid_decoder import PairedDecoder, layer_kinds, places_by_kind
from quire.executor.models.mixtures.deepseek import LatentAttentionMaker
from quire.executor.models.mixtures.glm4_moe import mixture_maker
from quire.executor.weights.rearranged import Piece, RearrangedWeights

_NAMES = (
    *("o_norm", "q_proj", "k_proj", "v_proj", "b_proj", "f_proj", "g_proj"),
    *("q_conv1d", "k_conv1d", "v_conv1d", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"),
)


class BailingHybridForCausalLM(PairedDecoder):
    """One of `layer_group_size` layers is attention. A gate multiplies each head."""

    SIZES = ("intermediate_size", "moe_intermediate_size")

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        spec = in_terms_of_deepseek(spec)
        config, shape = spec.hf_config, _delta_shape(spec)
        context = replace(
            context,
            weights=RearrangedWeights(context.weights, _pieces(), ends={"model.embed_tokens": "model.word_embeddings"}),
        )
        group = config["layer_group_size"]
        kinds = layer_kinds(
            config.get("layer_types")
            or ["linear_attention" if (index + 1) % group else "full_attention" for index in range(spec.num_layers)],
            spec,
        )
        make_attention = LatentAttentionMaker(spec, context, has_head_gates=True)

        def mixer(place: LayerPlace) -> LatentAttention | KimiDeltaAttention:
            is_recurrent = kinds[place.index] == "recurrent"
            return KimiDeltaAttention(context, place, shape) if is_recurrent else make_attention(place)

        ends = vocabulary_ends(spec, context, is_tied=config["tie_word_embeddings"])
        make_mlp = mixture_maker(spec, context, correction="expert_bias")
        super().__init__(spec, context, places_by_kind(context, kinds), mixer, make_mlp, ends)


def _pieces() -> dict[str, Piece]:
    """Maps names in the model to stored pieces; A_log and dt_bias are stored in the attention."""
    named = {f"self_attn.{name}": Piece(f"attention.{name}") for name in _NAMES}
    return {**named, "self_attn": Piece("attention"), "self_attn.o_proj": Piece("attention.dense")}


def _delta_shape(spec: ModelSpec) -> KimiDeltaShape:
    """Reads the sizes from the fields of the delta rule: in Transformers' files, `head_dim` is the attention's."""
    config = spec.hf_config
    return KimiDeltaShape(
        spec.hidden_size,
        spec.num_attention_heads,
        config.get("linear_head_dim", config["head_dim"]),
        config["short_conv_kernel_size"],
        gate_rank=None,
        least_log_decay=config["kda_lower_bound"] if config["kda_safe_gate"] else None,
        eps=norm_style(spec).eps,
    )
