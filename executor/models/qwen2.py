"""Qwen2 and Qwen2.5 (arXiv:2407.10671, 2412.15115)."""

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.attention import Attention
from quire.executor.layers.context import ModelContext
from quire.executor.models.decoder import Decoder, attention_shape, sliding_windows


class Qwen2ForCausalLM(Decoder):
    """Llama with biases on queries, keys and values, and windows on some layers."""

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        windows = sliding_windows(spec.hf_config, spec.num_layers)

        def attention(name: str, index: int) -> Attention:
            return Attention(context, name, attention_shape(spec), qkv_bias=True, window=windows[index])

        super().__init__(spec, context, attention)
