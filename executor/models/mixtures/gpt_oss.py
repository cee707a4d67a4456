"""gpt-oss (arXiv:2508.10925): sinks, every second layer with a window, and experts with biases and clamped gates."""

from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.executor.layers.attention.grouped_query import Attention, LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.experts.mixture import Mixture, RoutedExperts
from quire.executor.layers.experts.shape import ExpertShape
from quire.executor.layers.experts.stored import FusedExperts, Mxfp4Experts, SeparateExperts, StoredExperts
from quire.executor.layers.positions.rotary import RotaryEmbedding
from quire.executor.models.decoder import PreNormDecoder, SettingError, attention_shape, layer_windows, size_of
from quire.executor.weights.quantization.schemes import OF_EXPERTS, is_gguf, own_config
from quire.ops.activations import SWIGLU_ALPHA, SWIGLU_LIMIT
from quire.ops.backend import AttentionForm
from quire.ops.routing import Routing


class GptOssForCausalLM(PreNormDecoder):
    """The rows of gate and up alternate in a checkpoint, whose experts are MXFP4 or unquantized."""

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config = spec.hf_config
        _check_gates(spec)
        types = config.get("layer_types") or [
            "full_attention" if index % 2 else "sliding_attention" for index in range(spec.num_layers)
        ]
        windows = layer_windows(types, config["sliding_window"], spec.num_layers)
        rotary, bias = RotaryEmbedding(context, config, spec.head_dim), config["attention_bias"]
        shape = ExpertShape(size_of(spec, "num_local_experts"), spec.hidden_size, size_of(spec, "intermediate_size"))
        routing = Routing(size_of(spec, "num_experts_per_tok", "experts_per_token"), renormalize=True)

        def attention(place: LayerPlace) -> Attention:
            sinks = context.read(f"{place.name}.self_attn.sinks", (spec.num_attention_heads,))
            form = AttentionForm(spec.head_dim**-0.5, windows[place.index], sinks=sinks)
            return Attention(
                context, place, attention_shape(spec), rotary, qkv_bias=bias, output_bias=bias, form=form
            )  # fmt: skip

        def mixture(place: LayerPlace) -> Mixture:
            name = f"{place.name}.mlp"
            routed = RoutedExperts(
                context, f"{name}.router", routing, _stored_experts(spec, f"{name}.experts"), shape, "clamped_swiglu",
                bias=True,
            )  # fmt: skip
            return Mixture(context, [routed])

        super().__init__(spec, context, attention, mixture)


def _stored_experts(spec: ModelSpec, name: str) -> StoredExperts:
    if is_gguf(spec):
        return SeparateExperts(f"{name}.{{}}", has_bias=True)
    is_mxfp4 = own_config(spec)[0] == OF_EXPERTS
    form = Mxfp4Experts if is_mxfp4 else FusedExperts
    return form(
        f"{name}.gate_up_proj", f"{name}.down_proj", is_transposed=not is_mxfp4, is_interleaved=True, has_bias=True
    )  # fmt: skip


def _check_gates(spec: ModelSpec) -> None:
    """Leaves unknown gates to the Transformers class, if the experts are unquantized.

    Raises:
        SettingError: another slope or limit than that of all published models.
        ModelLoadError: the same, and the experts are quantized.
    """
    is_quantized = is_gguf(spec) or own_config(spec)[0] == OF_EXPERTS
    for field, known in (("swiglu_alpha", SWIGLU_ALPHA), ("swiglu_limit", SWIGLU_LIMIT)):
        value = spec.hf_config.get(field, known)
        if value != known and is_quantized:
            raise ModelLoadError(
                f"{spec.name}: {field} {value} is not supported with experts that are quantized; only {known}. Take a "
                "checkpoint whose experts are not."
            )
        if value != known:
            raise SettingError(f"{spec.name}: {field} {value} is not supported in {spec.architecture}; only {known}.")
