"""Qwen2 and Qwen2.5 (arXiv:2407.10671, 2412.15115)."""

from collections.abc import Mapping, Sequence
from typing import Any

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.attention.dual_chunk import rotated_attention
from quire.executor.layers.attention.grouped_query import LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.models.decoder import MLPMaker, PreNormDecoder, SelfAttention, attention_shape, layer_windows
from quire.ops.backend import AttentionForm


class Qwen2ForCausalLM(PreNormDecoder):
    """Llama with biases on queries, keys and values, and windows on some layers."""

    def __init__(
        self,
        spec: ModelSpec,
        context: ModelContext,
        make_mlp: MLPMaker | None = None,
        *,
        windows: Sequence[int | None] | None = None,
    ) -> None:
        """Takes each layer's window in `windows`; None: as `sliding_windows` reads them."""
        windows = windows or sliding_windows(spec.hf_config, spec.num_layers)
        bias = spec.hf_config.get("qkv_bias", True)
        make = rotated_attention(context, spec.hf_config, spec.head_dim)

        def attention(place: LayerPlace) -> SelfAttention:
            form = AttentionForm(spec.head_dim**-0.5, windows[place.index])
            return make(context, place, attention_shape(spec), qkv_bias=bias, form=form)

        super().__init__(spec, context, attention, make_mlp)


def sliding_windows(config: Mapping[str, Any], num_layers: int) -> list[int | None]:
    """Returns each layer's window in Qwen checkpoints: `layer_types`, or every layer from `max_window_layers` on."""
    window = config["sliding_window"] if config.get("use_sliding_window") else None
    first = config["max_window_layers"]
    types = config.get("layer_types")
    if types is None:
        types = ["sliding_attention" if index >= first else "full_attention" for index in range(num_layers)]
    return layer_windows(types, window, num_layers)
