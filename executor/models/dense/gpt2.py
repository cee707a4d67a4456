"""GPT-2 (https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf)."""

from dataclasses import replace

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.attention.grouped_query import Attention, LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.mlp import MLP
from quire.executor.layers.norm import NormStyle
from quire.executor.layers.vocabulary import positioned_embedding
from quire.executor.models.blocks import ResidualLayer
from quire.executor.models.decoder import Decoder, activation_of, attention_shape, layer_places, vocabulary_ends
from quire.executor.weights.quantization.schemes import is_gguf
from quire.executor.weights.rearranged import Piece, RearrangedWeights, fused
from quire.ops.backend import AttentionForm

_ENDS = {"model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f"}


class GPT2LMHeadModel(Decoder):
    """Layer norms, learned positions, a feed-forward network without a gate.

    Weights are stored as [in, out], except in GGUF files.
    """

    SIZES = ("n_embd",)

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config, size = spec.hf_config, spec.hidden_size
        is_transposed = not is_gguf(spec)
        q, k, v = fused("attn.c_attn", size, size, size, is_transposed=is_transposed)
        pieces = {
            "input_layernorm": Piece("ln_1"),
            "self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v,
            "self_attn.o_proj": Piece("attn.c_proj", is_transposed=is_transposed),
            "post_attention_layernorm": Piece("ln_2"),
            "mlp.up_proj": Piece("mlp.c_fc", is_transposed=is_transposed),
            "mlp.down_proj": Piece("mlp.c_proj", is_transposed=is_transposed),
        }  # fmt: skip
        weights = RearrangedWeights(context.weights, pieces, layer="transformer.h.{}", ends=_ENDS)
        context = replace(context, weights=weights)
        style = NormStyle(config["layer_norm_epsilon"], is_centred=True, has_bias=True)
        inner, activation = config.get("n_inner") or 4 * size, activation_of(spec, "activation_function", "gelu_new")

        def layer(place: LayerPlace) -> ResidualLayer:
            attention = Attention(
                context, place, attention_shape(spec), None, qkv_bias=True, output_bias=True, form=_form(spec, place)
            )  # fmt: skip
            return ResidualLayer(
                context.ops, attention, MLP(context, f"{place.name}.mlp", size, inner, activation),
                before_attention=style.layer(context, f"{place.name}.input_layernorm", size),
                before_mlp=style.layer(context, f"{place.name}.post_attention_layernorm", size),
            )  # fmt: skip

        embed, head = vocabulary_ends(spec, context, is_tied=config["tie_word_embeddings"])
        positioned = positioned_embedding(
            context, embed, "transformer.wpe.weight", spec.max_position_embeddings, size
        )  # fmt: skip
        layers = [layer(place) for place in layer_places(spec, context)]
        super().__init__(positioned, layers, style.layer(context, "model.norm", size), head)


def _form(spec: ModelSpec, place: LayerPlace) -> AttentionForm:
    scale = spec.head_dim**-0.5 if spec.hf_config["scale_attn_weights"] else 1.0
    by_layer = place.index + 1 if spec.hf_config.get("scale_attn_by_inverse_layer_idx") else 1
    return AttentionForm(scale / by_layer)
