"""InternLM2 (arXiv:2403.17297): Llama with queries, keys and values in one tensor, by KV head."""

from dataclasses import replace

from msgspec.structs import replace as changed

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.context import ModelContext
from quire.executor.models.dense.llama import LlamaForCausalLM
from quire.executor.weights.rearranged import Piece, RearrangedWeights, fused

_ENDS = {"model.embed_tokens": "model.tok_embeddings", "lm_head": "output"}


class InternLM2ForCausalLM(LlamaForCausalLM):
    """config.json's `bias` is that of attention."""

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        size, num_blocks = spec.head_dim, spec.num_kv_heads
        rows = spec.num_attention_heads // num_blocks * size
        q, k, v = fused("attention.wqkv", rows, size, size, num_blocks=num_blocks)
        pieces = {
            "input_layernorm": Piece("attention_norm"),
            "self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v,
            "self_attn.o_proj": Piece("attention.wo"),
            "post_attention_layernorm": Piece("ffn_norm"),
            "mlp.gate_proj": Piece("feed_forward.w1"), "mlp.up_proj": Piece("feed_forward.w3"),
            "mlp.down_proj": Piece("feed_forward.w2"),
        }  # fmt: skip
        weights = RearrangedWeights(context.weights, pieces, ends=_ENDS)
        config = {"attention_bias": spec.hf_config.get("bias", False), **spec.hf_config}
        super().__init__(changed(spec, hf_config=config), replace(context, weights=weights))
