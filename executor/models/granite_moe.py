"""Granite 3, mixture of experts (arXiv:2408.13359)."""

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.attention import LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.experts import ExpertShape, FusedExperts, SeparateExperts
from quire.executor.layers.mixture import Mixture, RoutedExperts
from quire.executor.models.decoder import activation_of, size_of
from quire.executor.models.granite import GraniteForCausalLM
from quire.executor.weights.quantisation.schemes import OF_GGUF
from quire.ops.routing import Routing


class GraniteMoeForCausalLM(GraniteForCausalLM):
    """Granite with experts in place of the feed-forward blocks."""

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        shape = ExpertShape(size_of(spec, "num_local_experts"), spec.hidden_size, size_of(spec, "intermediate_size"))
        routing = Routing(size_of(spec, "num_experts_per_tok"), renormalise=True)
        activation = activation_of(spec, "hidden_act")
        method = (spec.hf_config.get("quantization_config") or {}).get("quant_method")

        def mixture(place: LayerPlace) -> Mixture:
            name = f"{place.name}.block_sparse_moe"
            experts = (
                SeparateExperts(f"{name}.experts.{{}}", "w1", "w3", "w2")
                if method == OF_GGUF
                else FusedExperts(f"{name}.input_linear.weight", f"{name}.output_linear.weight")
            )
            routed = RoutedExperts(context, f"{name}.router.layer", routing, experts, shape, activation)
            return Mixture(context, [routed])

        super().__init__(spec, context, mixture)
