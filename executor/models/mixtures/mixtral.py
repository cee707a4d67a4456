"""Mixtral (arXiv:2401.04088): Mistral, with the best two of eight experts for each token."""

from collections.abc import Callable

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.attention.grouped_query import LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.experts.mixture import Mixture, RoutedExperts
from quire.executor.layers.experts.shape import ExpertShape
from quire.executor.layers.experts.stored import SeparateExperts
from quire.executor.models.decoder import activation_of, size_of
from quire.executor.models.dense.llama import LlamaForCausalLM
from quire.ops.routing import Routing


class MixtralForCausalLM(LlamaForCausalLM):
    """A missing `sliding_window` means no window."""

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        windows = [spec.hf_config.get("sliding_window")] * spec.num_layers
        super().__init__(spec, context, mixture_maker(spec, context), windows=windows)


def mixture_maker(spec: ModelSpec, context: ModelContext) -> Callable[[LayerPlace], Mixture]:
    """Builds the experts of a layer."""
    shape = ExpertShape(size_of(spec, "num_local_experts"), spec.hidden_size, size_of(spec, "intermediate_size"))
    routing = Routing(size_of(spec, "num_experts_per_tok"), renormalize=True)
    activation = activation_of(spec, "hidden_act")

    def mixture(place: LayerPlace) -> Mixture:
        name = f"{place.name}.block_sparse_moe"
        stored = SeparateExperts(f"{name}.experts.{{}}", gate="w1", up="w3", down="w2")
        return Mixture(context, [RoutedExperts(context, f"{name}.gate", routing, stored, shape, activation)])

    return mixture
