"""GPT-NeoX (arXiv:2204.06745) and Pythia (arXiv:2304.01373)."""

from dataclasses import replace

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.attention.grouped_query import Attention, LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.mlp import MLP
from quire.executor.layers.norm import NormStyle
from quire.executor.layers.positions.rotary import RotaryEmbedding
from quire.executor.models.blocks import ParallelLayer, ResidualLayer
from quire.executor.models.decoder import (
    Decoder,
    activation_of,
    attention_shape,
    layer_places,
    size_of,
    vocabulary_ends,
)
from quire.executor.weights.quantization.schemes import is_gguf
from quire.executor.weights.rearranged import Piece, RearrangedWeights, fused

_ENDS = {"model.embed_tokens": "gpt_neox.embed_in", "model.norm": "gpt_neox.final_layer_norm", "lm_head": "embed_out"}


class GPTNeoXForCausalLM(Decoder):
    """Both blocks of a layer read the same sum through different layer norms; a part of each head is rotated."""

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config, size = spec.hf_config, spec.hidden_size
        num_blocks = 1 if is_gguf(spec) else spec.num_attention_heads  # in GGUF files all keys follow all queries
        rows = spec.num_attention_heads * spec.head_dim // num_blocks
        q, k, v = fused("attention.query_key_value", rows, rows, rows, num_blocks=num_blocks)
        pieces = {
            "self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v,
            "self_attn.o_proj": Piece("attention.dense"),
            "mlp.up_proj": Piece("mlp.dense_h_to_4h"), "mlp.down_proj": Piece("mlp.dense_4h_to_h"),
        }  # fmt: skip
        weights = RearrangedWeights(context.weights, pieces, layer="gpt_neox.layers.{}", ends=_ENDS)
        context = replace(context, weights=weights)
        rotary = RotaryEmbedding(context, {"rotary_pct": 0.25, **config}, spec.head_dim)
        style = NormStyle(config["layer_norm_eps"], is_centred=True, has_bias=True)
        bias, activation = config["attention_bias"], activation_of(spec, "hidden_act", "gelu")

        def layer(place: LayerPlace) -> ParallelLayer | ResidualLayer:
            attention = Attention(context, place, attention_shape(spec), rotary, qkv_bias=bias, output_bias=bias)
            mlp = MLP(context, f"{place.name}.mlp", size, size_of(spec, "intermediate_size"), activation)
            before_attention, before_mlp = (
                style.layer(context, f"{place.name}.{name}_layernorm", size) for name in ("input", "post_attention")
            )
            if config["use_parallel_residual"]:
                return ParallelLayer(context.ops, attention, mlp, before_attention, before_mlp)
            return ResidualLayer(
                context.ops, attention, mlp, before_attention=before_attention, before_mlp=before_mlp
            )  # fmt: skip

        embed, head = vocabulary_ends(spec, context, is_tied=config["tie_word_embeddings"])
        layers = [layer(place) for place in layer_places(spec, context)]
        super().__init__(embed, layers, style.layer(context, "model.norm", size), head)
