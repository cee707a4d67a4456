"""Qwen3, dense (arXiv:2505.09388)."""

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.attention import Attention
from quire.executor.layers.context import ModelContext
from quire.executor.models.decoder import Decoder, attention_shape, rms_norm_eps, sliding_windows


class Qwen3ForCausalLM(Decoder):
    """Qwen2 without the biases, each head of queries and keys normalised before rotation."""

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config = spec.hf_config
        windows = sliding_windows(config, spec.num_layers)
        bias = config.get("attention_bias", False)

        def attention(name: str, index: int) -> Attention:
            return Attention(
                context, name, attention_shape(spec), qkv_bias=bias, output_bias=bias,
                qk_norm_eps=rms_norm_eps(spec), window=windows[index],
            )  # fmt: skip

        super().__init__(spec, context, attention)
