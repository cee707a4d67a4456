"""The fields of config.json that models with latent attention add to those of all."""

from quire.frontend.checkpoint.gguf.fields import Config, Fields, named
from quire.frontend.checkpoint.gguf.mixtures import SIGMOID
from quire.frontend.checkpoint.gguf.rotation import make_rope, with_temperatures

_LOG_FACTOR = 0.1
"""Of YaRN's temperature (arXiv:2309.00071, section 3.4), which files multiply by a model's `mscale_all_dim`."""


def deepseek2(fields: Fields) -> Config:
    """DeepSeek V2, V3 and their relatives, which differ by their router's scores.

    Keys and values are a layer's latents where the file has `key_length_mla`, and those of its heads in older files.
    """
    own = latents(fields)
    if (log := fields.get("rope.scaling.yarn_log_multiplier")) is not None:
        weight = log / _LOG_FACTOR
        own["rope_parameters"] = with_temperatures(own["rope_parameters"], weight, weight)
    if beta := fields.get("attention.temperature_scale"):  # of Mistral Large 3
        own["rope_parameters"]["llama_4_scaling_beta"] = beta
    if not fields.get("expert_count"):
        return named("YoutuForCausalLM", "youtu", **own)
    groups = fields.get("expert_group_count", 1)
    own |= {
        "n_routed_experts": fields.need("expert_count"), "num_experts_per_tok": fields.need("expert_used_count"),
        "n_shared_experts": fields.get("expert_shared_count", 0),
        "moe_intermediate_size": fields.need("expert_feed_forward_length"),
        "first_k_dense_replace": fields.get("leading_dense_block_count", 0),
        "norm_topk_prob": fields.get("expert_weights_norm", False),
        "routed_scaling_factor": fields.get("expert_weights_scale", 1.0),
        "n_group": groups, "topk_group": fields.get("expert_group_used_count", 1),
        "topk_method": "greedy" if groups == 1 else "group_limited_greedy",
    }  # fmt: skip
    scores = fields.get("expert_gating_func") or (SIGMOID if fields.has_any("exp_probs_b.bias") else None)
    if scores == SIGMOID:
        return named("DeepseekV3ForCausalLM", "deepseek_v3", **own)
    return named("DeepseekV2ForCausalLM", "deepseek_v2", **own)


def glm_dsa(fields: Fields) -> Config:
    """GLM 5: latent attention to the tokens that indexers choose; layers without one share the last choice."""
    layers = range(fields.need("block_count") - fields.get("nextn_predict_layers", 0))
    return {
        **deepseek2(fields),
        **named("GlmMoeDsaForCausalLM", "glm_moe_dsa"),
        "num_hidden_layers": len(layers),
        "attention_bias": fields.has_any("attn_q_a.bias"),
        "index_n_heads": fields.need_some("attention.indexer.head_count"),
        "index_head_dim": fields.need("attention.indexer.key_length"),
        "index_topk": fields.need("attention.indexer.top_k"),
        "indexer_types": ["full" if fields.has(layer, "indexer.attn_k.weight") else "shared" for layer in layers],
    }


_MISTRAL_BETA = 0.1
"""Of Mistral Small 4's queries, which grow with their positions; llama.cpp's converter leaves it out."""


def mistral4(fields: Fields) -> Config:
    own = deepseek2(fields)
    own["rope_parameters"].setdefault("llama_4_scaling_beta", _MISTRAL_BETA)
    return {**own, **named("Mistral4ForCausalLM", "mistral4")}


_SCALE_EMBEDDING, _SCALE_DEPTH, _BASE_SIZE = 12.0, 1.4, 256
"""Of MiniCPM 3; llama.cpp's code says them, not the file."""


def minicpm3(fields: Fields) -> Config:
    return named(
        "MiniCPM3ForCausalLM", "minicpm3", **latents(fields), scale_emb=_SCALE_EMBEDDING, scale_depth=_SCALE_DEPTH,
        dim_model_base=_BASE_SIZE,
    )  # fmt: skip


def latents(fields: Fields) -> Config:
    """Sizes of latent attention, and its rotation. Files that lack the size of values have it in a tensor."""
    heads, rotated = fields.num_heads, fields.need("rope.dimension_count")
    values = fields.get("attention.value_length_mla") or fields.get("attention.value_length")
    return {
        "num_key_value_heads": heads, "head_dim": rotated, "hidden_act": "silu",
        "q_lora_rank": fields.get("attention.q_lora_rank"), "kv_lora_rank": fields.need("attention.kv_lora_rank"),
        "qk_nope_head_dim": fields.head_dim - rotated, "qk_rope_head_dim": rotated,
        "v_head_dim": values or fields.tensors["blk.0.attn_output.weight"].shape[1] // heads,
        "rope_parameters": make_rope(fields, rotated),
    }  # fmt: skip
