"""Sarvam 30B (sarvamai/sarvam-30b on the hub): GLM 4.5 with fused projections and other names."""

from dataclasses import replace

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.context import ModelContext
from quire.executor.models.mixtures.glm4_moe import Glm4MoeForCausalLM
from quire.executor.weights.rearranged import Piece, RearrangedWeights, fused


class SarvamMoEForCausalLM(Glm4MoeForCausalLM):
    """config.json has either Sarvam's field names or GLM's."""

    correction = "expert_bias"

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        weights = RearrangedWeights(
            context.weights, _pieces(spec), ends={"model.embed_tokens": "model.word_embeddings"}
        )  # fmt: skip
        super().__init__(spec, replace(context, weights=weights))


def _pieces(spec: ModelSpec) -> dict[str, Piece]:
    """Maps names in the model to stored pieces."""
    size, kv_size = spec.num_attention_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    parts = dict(zip("qkv", fused("attention.query_key_value", size, kv_size, kv_size), strict=True))
    return {
        **{f"self_attn.{name}_proj": piece for name, piece in parts.items()},
        "self_attn.o_proj": Piece("attention.dense"),
        "self_attn.q_norm": Piece("attention.query_layernorm"),
        "self_attn.k_norm": Piece("attention.key_layernorm"),
    }
