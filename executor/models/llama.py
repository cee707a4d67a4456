"""Llama (arXiv:2302.13971, 2407.21783) and Mistral (arXiv:2310.06825), which is Llama with a window on every layer."""

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.attention import Attention, LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.rotary import RotaryEmbedding
from quire.executor.models.decoder import MLPMaker, PreNormDecoder, attention_shape, mlp_maker
from quire.ops.backend import AttentionForm


class LlamaForCausalLM(PreNormDecoder):
    """Grouped-query attention; `attention_bias` and `mlp_bias` as the checkpoint says."""

    def __init__(
        self,
        spec: ModelSpec,
        context: ModelContext,
        make_mlp: MLPMaker | None = None,
        *,
        window: int | None = None,
    ) -> None:
        bias = spec.hf_config.get("attention_bias", False)
        rotary = RotaryEmbedding(context, spec.hf_config, spec.head_dim)
        form = AttentionForm(spec.head_dim**-0.5, window)

        def attention(place: LayerPlace) -> Attention:
            return Attention(
                context, place, attention_shape(spec), rotary, qkv_bias=bias, output_bias=bias, form=form
            )  # fmt: skip

        make_mlp = make_mlp or mlp_maker(spec, context, bias=spec.hf_config.get("mlp_bias", False))
        super().__init__(spec, context, attention, make_mlp)


class MistralForCausalLM(LlamaForCausalLM):
    """`sliding_window` holds for every layer; null means no window, and a missing entry means 4096."""

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        super().__init__(spec, context, window=spec.hf_config.get("sliding_window", 4096))
