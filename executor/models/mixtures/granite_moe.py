"""Granite 3, mixture of experts (arXiv:2408.13359)."""

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.attention.grouped_query import LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.experts.mixture import Mixture, RoutedExperts
from quire.executor.layers.experts.shape import ExpertShape
from quire.executor.layers.experts.stored import FusedExperts, SeparateExperts, StoredExperts
from quire.executor.models.decoder import activation_of, size_of
from quire.executor.models.dense.granite import GraniteForCausalLM
from quire.executor.weights.quantization.schemes import is_gguf
from quire.ops.routing import Routing


class GraniteMoeForCausalLM(GraniteForCausalLM):
    """Granite with experts in place of the feed-forward blocks."""

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        shape = ExpertShape(size_of(spec, "num_local_experts"), spec.hidden_size, size_of(spec, "intermediate_size"))
        routing = Routing(size_of(spec, "num_experts_per_tok"), renormalize=True)
        activation = activation_of(spec, "hidden_act")

        def mixture(place: LayerPlace) -> Mixture:
            name = f"{place.name}.block_sparse_moe"
            routed = RoutedExperts(
                context, f"{name}.router.layer", routing, granite_experts(spec, name), shape, activation
            )  # fmt: skip
            return Mixture(context, [routed])

        super().__init__(spec, context, mixture)


def granite_experts(spec: ModelSpec, name: str) -> StoredExperts:
    """Returns the experts of the mixture `name`: all in one tensor, or one by one in GGUF files."""
    if is_gguf(spec):
        return SeparateExperts(f"{name}.experts.{{}}", "w1", "w3", "w2")
    return FusedExperts(f"{name}.input_linear.weight", f"{name}.output_linear.weight")
