"""Qwen1.5-MoE and Qwen2-MoE (arXiv:2407.10671): many small experts, and a shared one with a gate for each token."""

from collections.abc import Callable
from dataclasses import replace

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.attention.grouped_query import LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.experts.mixture import Mixture, RoutedExperts
from quire.executor.layers.experts.shape import ExpertShape
from quire.executor.layers.experts.stored import SeparateExperts, stored_experts
from quire.executor.models.decoder import FeedForward, MLPMaker, activation_of, mlp_maker, size_of
from quire.executor.models.dense.qwen2 import Qwen2ForCausalLM, sliding_windows
from quire.ops.routing import Routing


class Qwen2MoeForCausalLM(Qwen2ForCausalLM):
    """Qwen2 with mixtures on the layers that `decoder_sparse_step` and `mlp_only_layers` select."""

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        mlps = sparse_mlps(spec, context, mixture_maker(spec, context))
        super().__init__(spec, context, mlps, windows=_windows(spec))


def mixture_maker(
    spec: ModelSpec, context: ModelContext, *, renormalize: bool | None = None
) -> Callable[[LayerPlace], Mixture]:
    """Builds the experts of a layer: routed ones, and a shared one with a gate for each token.

    `renormalize` as for `routed_experts`.
    """
    shape = ExpertShape(1, spec.hidden_size, size_of(spec, "shared_expert_intermediate_size"))
    cut = replace(context, experts=None)  # a shared expert is divided like any other layer

    def mixture(place: LayerPlace) -> Mixture:
        name = f"{place.name}.mlp"
        shared = RoutedExperts(
            cut, f"{name}.shared_expert_gate", Routing(1, "sigmoid"), SeparateExperts(f"{name}.shared_expert"),
            shape, activation_of(spec, "hidden_act"),
        )  # fmt: skip
        return Mixture(context, [routed_experts(spec, context, name, renormalize=renormalize), shared])

    return mixture


def _windows(spec: ModelSpec) -> list[int | None]:
    """Returns each layer's window. Without `layer_types`, every second layer before `max_window_layers` has one."""
    config = spec.hf_config
    if config.get("layer_types") is not None or not config.get("use_sliding_window"):
        return sliding_windows(config, spec.num_layers)
    first_full, window = config["max_window_layers"], config["sliding_window"]
    return [window if index % 2 == 0 and index < first_full else None for index in range(spec.num_layers)]


def routed_experts(
    spec: ModelSpec, context: ModelContext, name: str, *, renormalize: bool | None = None
) -> RoutedExperts:
    """Builds the routed experts of the block `name`, from Qwen's fields in config.json.

    `renormalize`: the weights of a token's experts sum to 1; None: as config.json says.
    """
    num_experts = size_of(spec, "num_experts", "num_local_experts")
    shape = ExpertShape(num_experts, spec.hidden_size, size_of(spec, "moe_intermediate_size"))
    if renormalize is None:
        renormalize = spec.hf_config.get("norm_topk_prob", False)
    routing = Routing(size_of(spec, "num_experts_per_tok"), renormalize=renormalize)
    stored = stored_experts(context, f"{name}.experts")
    return RoutedExperts(context, f"{name}.gate", routing, stored, shape, activation_of(spec, "hidden_act"))


def sparse_mlps(spec: ModelSpec, context: ModelContext, mixture: MLPMaker) -> MLPMaker:
    """Returns `mixture` for every `decoder_sparse_step`-th layer that `mlp_only_layers` does not name; others are
    dense.
    """
    step, dense = spec.hf_config.get("decoder_sparse_step", 1), spec.hf_config.get("mlp_only_layers") or []
    mlp = mlp_maker(spec, context)

    def make(place: LayerPlace) -> FeedForward:
        is_sparse = (place.index + 1) % step == 0 and place.index not in dense
        return mixture(place) if is_sparse else mlp(place)

    return make
