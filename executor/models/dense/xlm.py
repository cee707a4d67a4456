"""XLM (arXiv:1901.07291) as a decoder, if config.json has `causal`."""

from dataclasses import replace

from torch import Tensor

from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.executor.layers.attention.grouped_query import Attention, LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.mlp import MLP
from quire.executor.layers.norm import Norm, NormStyle
from quire.executor.layers.step_context import StepContext
from quire.executor.layers.vocabulary import Embedding, positioned_embedding
from quire.executor.models.blocks import PostNormLayer
from quire.executor.models.decoder import Decoder, SettingError, attention_shape, layer_places, vocabulary_ends
from quire.executor.weights.rearranged import Piece, RearrangedWeights
from quire.ops.activations import PlainActivation

_PIECES = {
    "self_attn.q_proj": Piece("attentions.{}.q_lin"),
    "self_attn.k_proj": Piece("attentions.{}.k_lin"),
    "self_attn.v_proj": Piece("attentions.{}.v_lin"),
    "self_attn.o_proj": Piece("attentions.{}.out_lin"),
    "post_attention_layernorm": Piece("layer_norm1.{}"),
    "mlp.up_proj": Piece("ffns.{}.lin1"),
    "mlp.down_proj": Piece("ffns.{}.lin2"),
    "post_mlp_layernorm": Piece("layer_norm2.{}"),
}
_ENDS = {"model.embed_tokens": "transformer.embeddings", "lm_head": "pred_layer.proj"}


class XLMWithLMHeadModel(Decoder):
    """A norm follows the embedding and each block; learned positions; all tokens have the language `lang_id`."""

    SIZES = ("emb_dim",)

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config, size = spec.hf_config, spec.hidden_size
        if not config.get("causal"):
            raise SettingError(
                f"{spec.name}: without `causal` in config.json, XLM fills in tokens and has no file here."
            )
        if config.get("asm"):
            raise ModelLoadError(f"{spec.name}: config.json's asm, a softmax over clusters, is not supported.")
        weights = RearrangedWeights(context.weights, _PIECES, layer="transformer", ends=_ENDS)
        context = replace(context, weights=weights)
        style = NormStyle(config["layer_norm_eps"], is_centred=True, has_bias=True)
        activation: PlainActivation = "gelu" if config["gelu_activation"] else "relu"

        def norm_after(index: int) -> Norm:
            name = f"model.layers.{index}.post_mlp_layernorm" if index >= 0 else "transformer.layer_norm_emb"
            return style.layer(context, name, size)

        def layer(place: LayerPlace) -> PostNormLayer:
            attention = Attention(context, place, attention_shape(spec), None, qkv_bias=True, output_bias=True)
            between = style.layer(context, f"{place.name}.post_attention_layernorm", size)
            mlp = MLP(context, f"{place.name}.mlp", size, 4 * size, activation)
            return PostNormLayer(norm_after(place.index - 1), attention, between, mlp)

        is_tied = config["tie_word_embeddings"]
        embed, head = vocabulary_ends(spec, context, is_tied=is_tied, head_bias=True)
        embed = positioned_embedding(
            context, embed, "transformer.position_embeddings.weight", spec.max_position_embeddings, size
        )  # fmt: skip
        num_languages, language = config["n_langs"], config["lang_id"]
        if num_languages > 1 and config["use_lang_emb"] and language is not None and context.is_first_stage:
            rows = context.read("transformer.lang_embeddings.weight", (num_languages, size))
            embed = _LanguageEmbedding(embed, rows[language])
        layers = [layer(place) for place in layer_places(spec, context)]
        super().__init__(embed, layers, norm_after(spec.num_layers - 1), head)


class _LanguageEmbedding:
    """Adds the embedding of the language that all tokens are in: [num_tokens] → [num_tokens, hidden]."""

    def __init__(self, embed: Embedding, row: Tensor) -> None:
        self._embed = embed
        self._row = row

    def __call__(self, token_ids: Tensor, step: StepContext) -> Tensor:
        return self._embed(token_ids, step) + self._row
