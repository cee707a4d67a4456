"""DeepSeek V3.2 (arXiv:2512.02556) and GLM 5: latent attention that sees the tokens of an indexer."""

from collections.abc import Sequence
from dataclasses import replace

from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.executor.layers.attention.grouped_query import LayerPlace
from quire.executor.layers.attention.token_selection import (
    IndexerShape,
    LightningIndexer,
    SharedSelection,
    TokenSelector,
)
from quire.executor.layers.context import ModelContext
from quire.executor.layers.positions.rotary import RotaryEmbedding
from quire.executor.models.decoder import PreNormDecoder, size_of
from quire.executor.models.mixtures.deepseek import LatentAttentionMaker, SelectorMaker
from quire.executor.models.mixtures.glm4_moe import mixture_maker
from quire.executor.weights.rearranged import Pairs, Piece, RearrangedWeights

_FULL, _SHARED = "full", "shared"


class DeepseekV32ForCausalLM(PreNormDecoder):
    """DeepSeek V3 with an indexer in each layer."""

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        make_selector = selector_maker(spec, context, [_FULL] * spec.num_layers)
        attention = LatentAttentionMaker(spec, context, make_selector=make_selector)
        super().__init__(spec, context, attention, mixture_maker(spec, context))


class GlmMoeDsaForCausalLM(PreNormDecoder):
    """GLM 5: some layers reuse the selection of an earlier indexer, and indexers rotate neighbours."""

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        pairs = Pairs(size_of(spec, "index_head_dim"), size_of(spec, "qk_rope_head_dim"))
        names = [f"self_attn.indexer.{name}" for name in ("wq_b", "wk", "k_norm")]
        weights = RearrangedWeights(context.weights, {name: Piece(name, pairs=pairs) for name in names})
        context = replace(context, weights=weights)
        make_selector = selector_maker(spec, context, indexer_types(spec))
        attention = LatentAttentionMaker(spec, context, make_selector=make_selector)
        super().__init__(spec, context, attention, mixture_maker(spec, context))


def selector_maker(spec: ModelSpec, context: ModelContext, types: Sequence[str]) -> SelectorMaker:
    """Builds each layer's indexer, or a `SharedSelection` where `types` has "shared".

    Raises:
        ModelLoadError: a size is missing.
    """
    shape = IndexerShape(
        hidden_size=spec.hidden_size,
        q_lora_rank=size_of(spec, "q_lora_rank"),
        num_heads=size_of(spec, "index_n_heads"),
        head_dim=size_of(spec, "index_head_dim"),
        top_k=size_of(spec, "index_topk"),
    )

    if types[context.layers.start] == _SHARED:
        raise ModelLoadError(
            f"{spec.name}: layer {context.layers.start} attends to the tokens that an earlier layer's indexer chooses, "
            "so it cannot be the first of a pipeline stage: begin stages at layers with an indexer of their own "
            f"({', '.join(str(i) for i in range(spec.num_layers) if types[i] == _FULL)}), in QUIRE_PP_LAYER_PARTITION."
        )

    def make(place: LayerPlace, rotary: RotaryEmbedding) -> TokenSelector:
        if types[place.index] == _SHARED:
            return SharedSelection(context, place)
        return LightningIndexer(context, place, f"{place.name}.self_attn.indexer", shape, rotary)

    return make


def indexer_types(spec: ModelSpec) -> Sequence[str]:
    """Returns "full" for each layer, or "shared" if it has no indexer. config.json has a list, a pattern of F and S, or
    an interval of full ones.

    Raises:
        ModelLoadError: config.json says something else, or leaves the first layer without an indexer.
    """
    config, num_layers = spec.hf_config, spec.num_layers
    types = config.get("indexer_types") or config.get("index_topk_pattern")
    if types is None:
        every, offset = max(config.get("index_topk_freq") or 1, 1), config.get("index_skip_topk_offset", 2)
        return [_SHARED if max(i - offset + 1, 0) % every else _FULL for i in range(num_layers)]
    types = [{"F": _FULL, "S": _SHARED}.get(kind, kind) for kind in types]
    if len(types) < num_layers or not {_FULL, _SHARED} >= set(types) or types[0] == _SHARED:
        raise ModelLoadError(
            f"config.json of {spec.name}: indexer_types must name full or shared for each of {num_layers} layers, the "
            f"first of them full; got {types}."
        )
    return types
