"""Qwen3, mixture of experts (arXiv:2505.09388)."""

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.attention.grouped_query import LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.experts.mixture import Mixture
from quire.executor.models.dense.qwen3 import Qwen3ForCausalLM
from quire.executor.models.mixtures.qwen2_moe import routed_experts, sparse_mlps


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """Qwen3 with the mixtures of Qwen2-MoE, but no shared expert; a window holds for every layer."""

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        def mixture(place: LayerPlace) -> Mixture:
            return Mixture(context, [routed_experts(spec, context, f"{place.name}.mlp")])

        config = spec.hf_config
        window = config["sliding_window"] if config["use_sliding_window"] else None
        windows = [window] * spec.num_layers
        super().__init__(spec, context, sparse_mlps(spec, context, mixture), windows=windows)
