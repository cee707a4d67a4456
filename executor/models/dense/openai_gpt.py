"""GPT (https://cdn.openai.com/research-covers/language-unsupervised/language_understanding_paper.pdf)."""

from dataclasses import replace

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.attention.grouped_query import Attention, LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.mlp import MLP
from quire.executor.layers.norm import Norm, NormStyle
from quire.executor.layers.vocabulary import positioned_embedding
from quire.executor.models.blocks import PostNormLayer
from quire.executor.models.decoder import Decoder, activation_of, attention_shape, layer_places, vocabulary_ends
from quire.executor.weights.rearranged import Piece, RearrangedWeights, fused


class OpenAIGPTLMHeadModel(Decoder):
    """A norm follows each block; otherwise like GPT-2. The last layer's second norm is the model's last."""

    SIZES = ("n_embd",)

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config, size = spec.hf_config, spec.hidden_size
        q, k, v = fused("attn.c_attn", size, size, size, is_transposed=True)
        pieces = {
            "self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v,
            "self_attn.o_proj": Piece("attn.c_proj", is_transposed=True),
            "mlp.up_proj": Piece("mlp.c_fc", is_transposed=True),
            "mlp.down_proj": Piece("mlp.c_proj", is_transposed=True),
        }  # fmt: skip
        ends = {"model.embed_tokens": "transformer.tokens_embed"}
        weights = RearrangedWeights(context.weights, pieces, layer="transformer.h.{}", ends=ends)
        context = replace(context, weights=weights)
        style = NormStyle(config["layer_norm_epsilon"], is_centred=True, has_bias=True)
        # In this family, the library's "gelu" is the approximation by tanh.
        activation = "gelu_tanh" if config["afn"] == "gelu" else activation_of(spec, "afn")

        def norm(index: int, name: str) -> Norm:
            return style.layer(context, f"model.layers.{index}.{name}", size)

        def layer(place: LayerPlace) -> PostNormLayer:
            attention = Attention(context, place, attention_shape(spec), None, qkv_bias=True, output_bias=True)
            mlp = MLP(context, f"{place.name}.mlp", size, 4 * size, activation)
            before = norm(place.index - 1, "ln_2") if place.index else None
            return PostNormLayer(before, attention, norm(place.index, "ln_1"), mlp)

        embed, head = vocabulary_ends(spec, context, is_tied=config["tie_word_embeddings"])
        positioned = positioned_embedding(
            context, embed, "transformer.positions_embed.weight", spec.max_position_embeddings, size
        )  # fmt: skip
        layers = [layer(place) for place in layer_places(spec, context)]
        super().__init__(positioned, layers, norm(spec.num_layers - 1, "ln_2"), head)
