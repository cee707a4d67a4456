"""StarCoder 2 (arXiv:2402.19173)."""

from dataclasses import replace

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.attention.grouped_query import Attention, LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.mlp import MLP
from quire.executor.layers.norm import NormStyle
from quire.executor.layers.positions.rotary import RotaryEmbedding
from quire.executor.models.blocks import ResidualLayer
from quire.executor.models.decoder import (
    Decoder,
    activation_of,
    attention_shape,
    layer_places,
    size_of,
    vocabulary_ends,
)
from quire.executor.weights.rearranged import Piece, RearrangedWeights
from quire.ops.backend import AttentionForm

_PIECES = {"mlp.up_proj": Piece("mlp.c_fc"), "mlp.down_proj": Piece("mlp.c_proj")}


class Starcoder2ForCausalLM(Decoder):
    """Grouped-query attention with a window on every layer, layer norms, a network without a gate, biases."""

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config, size = spec.hf_config, spec.hidden_size
        context = replace(context, weights=RearrangedWeights(context.weights, _PIECES))
        rotary = RotaryEmbedding(context, config, spec.head_dim)
        style = NormStyle(config["norm_epsilon"], is_centred=True, has_bias=True)
        form = AttentionForm(spec.head_dim**-0.5, config.get("sliding_window"))
        bias, activation = config["use_bias"], activation_of(spec, "hidden_act", "gelu_pytorch_tanh")

        def layer(place: LayerPlace) -> ResidualLayer:
            attention = Attention(
                context, place, attention_shape(spec), rotary, qkv_bias=bias, output_bias=bias, form=form
            )  # fmt: skip
            mlp = MLP(context, f"{place.name}.mlp", size, size_of(spec, "intermediate_size"), activation, bias=bias)
            return ResidualLayer(
                context.ops, attention, mlp,
                before_attention=style.layer(context, f"{place.name}.input_layernorm", size),
                before_mlp=style.layer(context, f"{place.name}.post_attention_layernorm", size),
            )  # fmt: skip

        embed, head = vocabulary_ends(spec, context, is_tied=config["tie_word_embeddings"])
        layers = [layer(place) for place in layer_places(spec, context)]
        super().__init__(embed, layers, style.layer(context, "model.norm", size), head)
