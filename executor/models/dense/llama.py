"""Llama (arXiv:2302.13971, 2407.21783) and Mistral (arXiv:2310.06825), which is Llama with windows."""

from collections.abc import Mapping, Sequence
from typing import Any

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.attention.grouped_query import LayerPlace
from quire.executor.layers.attention.sequence import self_attention
from quire.executor.layers.context import ModelContext
from quire.executor.layers.positions.rotary import RotaryEmbedding
from quire.executor.models.decoder import (
    MLPMaker,
    PreNormDecoder,
    SelfAttention,
    attention_shape,
    layer_windows,
    mlp_maker,
)
from quire.ops.backend import AttentionForm


class LlamaForCausalLM(PreNormDecoder):
    """Grouped-query attention; `attention_bias` and `mlp_bias` as the checkpoint says."""

    def __init__(
        self,
        spec: ModelSpec,
        context: ModelContext,
        make_mlp: MLPMaker | None = None,
        *,
        windows: Sequence[int | None] | None = None,
    ) -> None:
        """Takes each layer's window in `windows`; None: no layer has one."""
        bias = spec.hf_config.get("attention_bias", False)
        rotary = RotaryEmbedding(context, spec.hf_config, spec.head_dim)

        def attention(place: LayerPlace) -> SelfAttention:
            form = AttentionForm(spec.head_dim**-0.5, None if windows is None else windows[place.index])
            return self_attention(
                context, place, attention_shape(spec), rotary, qkv_bias=bias, output_bias=bias, form=form
            )  # fmt: skip

        make_mlp = make_mlp or mlp_maker(spec, context, bias=spec.hf_config.get("mlp_bias", False))
        super().__init__(spec, context, attention, make_mlp)


class MistralForCausalLM(LlamaForCausalLM):
    """`layer_types` names the layers with a window (Ministral); without it, all have one (Mistral)."""

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        super().__init__(spec, context, windows=_windows(spec.hf_config, spec.num_layers))


def _windows(config: Mapping[str, Any], num_layers: int) -> list[int | None]:
    """Returns the layers' windows. A `sliding_window` of null means none, and a missing one means 4096."""
    window = config.get("sliding_window", 4096)
    return layer_windows(config.get("layer_types") or ["sliding_attention"] * num_layers, window, num_layers)
