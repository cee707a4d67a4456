"""Qwen2 and Qwen2.5 (arXiv:2407.10671, 2412.15115)."""

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.attention import Attention, LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.rotary import RotaryEmbedding
from quire.executor.models.decoder import Decoder, attention_shape, pre_norm_layers, sliding_windows


class Qwen2ForCausalLM(Decoder):
    """Llama with biases on queries, keys and values, and windows on some layers."""

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        windows = sliding_windows(spec.hf_config, spec.num_layers)
        rotary = RotaryEmbedding(context, spec.hf_config, spec.head_dim)

        def attention(place: LayerPlace) -> Attention:
            window = windows[place.index]
            return Attention(context, place, attention_shape(spec), rotary, qkv_bias=True, window=window)

        super().__init__(spec, context, pre_norm_layers(spec, context, attention))
