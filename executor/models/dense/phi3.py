"""Phi-3 (arXiv:2404.14219) and Phi-4 (arXiv:2412.08905, 2503.01743)."""

from dataclasses import replace

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.context import ModelContext
from quire.executor.models.decoder import size_of
from quire.executor.models.dense.llama import LlamaForCausalLM
from quire.executor.weights.rearranged import RearrangedWeights, fused


class Phi3ForCausalLM(LlamaForCausalLM):
    """Llama, stored with fused layers; `sliding_window` holds for every layer."""

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        q_size, kv_size = spec.num_attention_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        q, k, v = fused("self_attn.qkv_proj", q_size, kv_size, kv_size)
        gate, up = fused("mlp.gate_up_proj", *[size_of(spec, "intermediate_size")] * 2)
        pieces = {
            "self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v,
            "mlp.gate_proj": gate, "mlp.up_proj": up,
        }  # fmt: skip
        own = replace(context, weights=RearrangedWeights(context.weights, pieces))
        super().__init__(spec, own, windows=[spec.hf_config.get("sliding_window")] * spec.num_layers)
