"""The DeepSeek family: multi-head latent attention (arXiv:2405.04434, 2412.19437)."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.executor.layers.attention.grouped_query import LayerPlace
from quire.executor.layers.attention.latent import LatentAttention, LatentShape
from quire.executor.layers.attention.query_temperature import QueryTemperature, query_temperature
from quire.executor.layers.attention.token_selection import TokenSelector
from quire.executor.layers.context import ModelContext
from quire.executor.layers.positions.rotary import RotaryEmbedding
from quire.executor.layers.positions.rotary_kinds import yarn_mscale
from quire.executor.models.decoder import PreNormDecoder, SettingError, size_of
from quire.executor.models.mixtures.glm4_moe import mixture_maker
from quire.ops.routing import Routing


class DeepseekV2ForCausalLM(PreNormDecoder):
    """Experts with softmax scores, chosen among all or within the best groups (arXiv:2405.04434, section 2.2)."""

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        mlp = mixture_maker(spec, context, _softmax_routing(spec))
        super().__init__(spec, context, LatentAttentionMaker(spec, context), mlp)


class DeepseekV3ForCausalLM(PreNormDecoder):
    """Experts with sigmoid scores, and corrections that balance them (arXiv:2412.19437). Also R1, V3.1 and Kimi K2."""

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        super().__init__(spec, context, LatentAttentionMaker(spec, context), mixture_maker(spec, context))


class Glm4MoeLiteForCausalLM(DeepseekV3ForCausalLM):
    """GLM 4.7 Flash: DeepSeek V3 with other sizes."""


class YoutuForCausalLM(PreNormDecoder):
    """DeepSeek V3 without experts."""

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        super().__init__(spec, context, LatentAttentionMaker(spec, context))


class Mistral4ForCausalLM(PreNormDecoder):
    """Mistral Small 4: experts with softmax scores, and queries that grow with their positions."""

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        rope = spec.hf_config.get("rope_parameters") or {}
        # The field is the rotated share of a whole head; here the rotated part is a tensor by itself.
        config = {**spec.hf_config, "rope_parameters": {**rope, "partial_rotary_factor": 1.0}}
        spec = msgspec.structs.replace(spec, hf_config=config)
        if (config.get("n_group") or 1) > 1:
            raise SettingError(f"{spec.name}: n_group {config['n_group']} is not supported in {spec.architecture}.")
        routing = Routing(
            size_of(spec, "num_experts_per_tok"),
            renormalize=config["norm_topk_prob"],
            scale=config["routed_scaling_factor"],
        )
        super().__init__(spec, context, LatentAttentionMaker(spec, context), mixture_maker(spec, context, routing))


SelectorMaker = Callable[[LayerPlace, RotaryEmbedding], TokenSelector]
"""Builds the selector of the tokens that a layer sees; it may rotate as the layer does."""


class LatentAttentionMaker:
    """Builds the attention of each layer, as config.json describes it for DeepSeek V2 and its relatives.

    `is_interleaved` is the rotation of families whose config.json does not name one; `has_head_gates` as in
    `LatentAttention`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        context: ModelContext,
        *,
        is_interleaved: bool = True,
        has_head_gates: bool = False,
        make_selector: SelectorMaker | None = None,
    ) -> None:
        config = spec.hf_config
        self._context = context
        self._shape = latent_shape(spec)
        self._rotary = RotaryEmbedding(context, config, self._shape.rope_head_dim)
        self._scale = _temperature(config) ** 2 * self._shape.q_head_dim**-0.5
        self._bias = config["attention_bias"]
        self._is_interleaved = config.get("rope_interleave", is_interleaved)
        self._has_head_gates = has_head_gates
        self._query_temperature = _query_temperature(spec, context)
        self._make_selector = make_selector

    def __call__(self, place: LayerPlace) -> LatentAttention:
        return LatentAttention(
            self._context, place, self._shape, self._rotary, scale=self._scale, bias=self._bias,
            is_interleaved=self._is_interleaved,
            selector=self._make_selector and self._make_selector(place, self._rotary),
            has_head_gates=self._has_head_gates, temperature=self._query_temperature,
        )  # fmt: skip


def latent_shape(spec: ModelSpec) -> LatentShape:
    """Reads the sizes of latent attention from config.json.

    Raises:
        ModelLoadError: a size is missing.
    """
    config = spec.hf_config
    return LatentShape(
        hidden_size=spec.hidden_size,
        num_heads=spec.num_attention_heads,
        q_lora_rank=config.get("q_lora_rank"),
        kv_lora_rank=size_of(spec, "kv_lora_rank"),
        nope_head_dim=size_of(spec, "qk_nope_head_dim"),
        rope_head_dim=size_of(spec, "qk_rope_head_dim"),
        v_head_dim=config.get("v_head_dim") or spec.hidden_size // spec.num_attention_heads,
    )


def _softmax_routing(spec: ModelSpec) -> Routing:
    """Returns DeepSeek V2's routing.

    Raises:
        ModelLoadError: another method than the two of its checkpoints.
    """
    config = spec.hf_config
    method = config["topk_method"]
    if method not in ("greedy", "group_limited_greedy"):
        raise ModelLoadError(
            f"{spec.name}: topk_method {method!r} is not supported in {spec.architecture}; only greedy and "
            "group_limited_greedy."
        )
    routing = Routing(
        size_of(spec, "num_experts_per_tok"),
        renormalize=config["norm_topk_prob"],
        scale=config["routed_scaling_factor"],
    )
    if method == "greedy":
        return routing
    return routing._replace(num_groups=size_of(spec, "n_group"), top_groups=size_of(spec, "topk_group"))


def _query_temperature(spec: ModelSpec, context: ModelContext) -> QueryTemperature | None:
    """Builds the factors by position that multiply the queries of Mistral's models.

    Raises:
        ModelLoadError: `original_max_position_embeddings` is missing.
    """
    rope = spec.hf_config.get("rope_parameters") or {}
    beta, period = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
    if not beta:
        return None
    if not isinstance(period, int) or period < 1:
        raise ModelLoadError(
            f"{spec.name}: rope_parameters of config.json has llama_4_scaling_beta, but "
            f"{period!r} as original_max_position_embeddings, the positions after which queries grow."
        )
    return query_temperature(context, beta, period)


def _temperature(config: Mapping[str, Any]) -> float:
    """Computes YaRN's factor of queries and keys for all dimensions; cosines and sines contain the rest."""
    settings = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return yarn_mscale(settings.get("factor") or 1.0, settings.get("mscale_all_dim") or 0.0)
