"""DeepSeekMoE (arXiv:2401.06066): Llama's attention, small routed experts, and shared experts."""

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.context import ModelContext
from quire.executor.models.decoder import size_of
from quire.executor.models.dense.llama import LlamaForCausalLM
from quire.executor.models.mixtures.glm4_moe import mixture_maker
from quire.ops.routing import Routing


class DeepseekForCausalLM(LlamaForCausalLM):
    """The first layers are dense; a token's experts are weighted by a softmax of the router's scores."""

    SIZES = ("moe_intermediate_size",)

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config = spec.hf_config
        routing = Routing(
            size_of(spec, "num_experts_per_tok"),
            renormalize=config.get("norm_topk_prob", False),
            scale=config.get("routed_scaling_factor", 1.0),
        )
        super().__init__(spec, context, mixture_maker(spec, context, routing))
