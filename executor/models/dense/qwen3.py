"""Qwen3, dense (arXiv:2505.09388)."""

from collections.abc import Sequence

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.attention.dual_chunk import rotated_attention
from quire.executor.layers.attention.grouped_query import LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.models.decoder import MLPMaker, PreNormDecoder, SelfAttention, attention_shape, norm_style
from quire.executor.models.dense.qwen2 import sliding_windows
from quire.ops.backend import AttentionForm


class Qwen3ForCausalLM(PreNormDecoder):
    """Qwen2 without the biases; each head of queries and keys is normalized before rotation."""

    def __init__(
        self,
        spec: ModelSpec,
        context: ModelContext,
        make_mlp: MLPMaker | None = None,
        *,
        windows: Sequence[int | None] | None = None,
    ) -> None:
        """Takes each layer's window in `windows`; None: as `sliding_windows` reads them."""
        config = spec.hf_config
        windows = windows or sliding_windows(config, spec.num_layers)
        bias = config["attention_bias"]
        make = rotated_attention(context, spec.hf_config, spec.head_dim)

        def attention(place: LayerPlace) -> SelfAttention:
            return make(
                context, place, attention_shape(spec), qkv_bias=bias, output_bias=bias,
                qk_norm=norm_style(spec), form=AttentionForm(spec.head_dim**-0.5, windows[place.index]),
            )  # fmt: skip

        super().__init__(spec, context, attention, make_mlp)
