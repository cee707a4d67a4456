"""Falcon (arXiv:2311.16867)."""

from dataclasses import replace

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.attention.grouped_query import Attention, AttentionShape, LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.mlp import MLP
from quire.executor.layers.norm import Norm, NormStyle
from quire.executor.layers.positions.alibi import alibi_slopes
from quire.executor.layers.positions.rotary import RotaryEmbedding
from quire.executor.models.blocks import ParallelLayer, ResidualLayer
from quire.executor.models.decoder import Decoder, activation_of, layer_places, vocabulary_ends
from quire.executor.weights.quantization.schemes import is_gguf
from quire.executor.weights.rearranged import Piece, RearrangedWeights, fused
from quire.ops.backend import AttentionForm

_ENDS = {"model.embed_tokens": "transformer.word_embeddings", "model.norm": "transformer.ln_f"}


class FalconForCausalLM(Decoder):
    """Few KV heads, both blocks of a layer in parallel, no biases; smaller models differ, and may have ALiBi."""

    SIZES = ("hidden_size",)

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config, size, heads = spec.hf_config, spec.hidden_size, spec.num_attention_heads
        is_new = config["new_decoder_architecture"]
        multi_query = config["multi_query"]
        kv_heads = config.get("num_kv_heads") or heads if is_new else 1 if multi_query else heads
        shape = AttentionShape(size, heads, kv_heads, spec.head_dim)
        weights = RearrangedWeights(
            context.weights, _pieces(shape, is_gguf(spec)), layer="transformer.h.{}", ends=_ENDS
        )
        context = replace(context, weights=weights)
        style = NormStyle(config["layer_norm_epsilon"], is_centred=True, has_bias=True)
        scale, has_alibi = spec.head_dim**-0.5, config["alibi"]
        form = AttentionForm(scale, slopes=alibi_slopes(heads) * scale if has_alibi else None)
        rotary = None if has_alibi else RotaryEmbedding(context, config, spec.head_dim)
        bias, activation = config["bias"], activation_of(spec, "activation", "gelu")
        has_two_norms = is_new and config.get("num_ln_in_parallel_attn") in (None, 2)

        def layer(place: LayerPlace) -> ParallelLayer | ResidualLayer:
            def norm(name: str) -> Norm:
                return style.layer(context, f"{place.name}.{name}", size)

            attention = Attention(context, place, shape, rotary, qkv_bias=bias, output_bias=bias, form=form)
            mlp = MLP(
                context, f"{place.name}.mlp", size, config.get("ffn_hidden_size") or 4 * size, activation, bias=bias
            )  # fmt: skip
            if has_two_norms:
                return ParallelLayer(context.ops, attention, mlp, norm("ln_attn"), norm("ln_mlp"))
            if is_new or config["parallel_attn"]:
                return ParallelLayer(context.ops, attention, mlp, norm("input_layernorm"))
            return ResidualLayer(
                context.ops, attention, mlp, before_attention=norm("input_layernorm"),
                before_mlp=norm("post_attention_layernorm"),
            )  # fmt: skip

        embed, head = vocabulary_ends(spec, context, is_tied=config["tie_word_embeddings"])
        layers = [layer(place) for place in layer_places(spec, context)]
        super().__init__(embed, layers, style.layer(context, "model.norm", size), head)


def _pieces(shape: AttentionShape, is_gguf: bool) -> dict[str, Piece]:
    """Maps layers to pieces. A KV head is stored after its queries; in GGUF files, all keys follow all queries."""
    num_blocks = 1 if is_gguf else shape.num_kv_heads
    queries, keys = (heads * shape.head_dim // num_blocks for heads in (shape.num_heads, shape.num_kv_heads))
    q, k, v = fused("self_attention.query_key_value", queries, keys, keys, num_blocks=num_blocks)
    return {
        "self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v,
        "self_attn.o_proj": Piece("self_attention.dense"),
        "mlp.up_proj": Piece("mlp.dense_h_to_4h"), "mlp.down_proj": Piece("mlp.dense_4h_to_h"),
    }  # fmt: skip
