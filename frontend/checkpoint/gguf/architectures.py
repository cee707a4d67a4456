"""The fields of config.json that each architecture of llama.cpp adds to those of all.

What llama.cpp fixes in its code for an architecture, and no file says, is written here.
"""

from collections.abc import Callable, Mapping
from typing import Any

from quire.core.errors import ConfigError
from quire.frontend.checkpoint.gguf.fields import Config, Fields
from quire.frontend.checkpoint.gguf.rotation import make_rope


def _named(name: str, model_type: str, **more: Any) -> Config:
    return {"architectures": [name], "model_type": model_type, **more}


def _llama(fields: Fields) -> Config:
    if fields.get("expert_count"):
        return _named(
            "MixtralForCausalLM", "mixtral", num_local_experts=fields.need("expert_count"),
            num_experts_per_tok=fields.need("expert_used_count"),
        )  # fmt: skip
    return _named("LlamaForCausalLM", "llama", hidden_act="silu")


def _experts(fields: Fields) -> Config:
    return {
        "num_experts": fields.need("expert_count"),
        "num_experts_per_tok": fields.need("expert_used_count"),
        "moe_intermediate_size": fields.get("expert_feed_forward_length") or fields.need("feed_forward_length"),
        "hidden_act": "silu",
    }


def _qwen2moe(fields: Fields) -> Config:
    size = fields.tensors["blk.0.ffn_gate_shexp.weight"].shape[0]
    experts = {**_experts(fields), "moe_intermediate_size": fields.tensors["blk.0.ffn_gate_exps.weight"].shape[1]}
    return _named("Qwen2MoeForCausalLM", "qwen2_moe", **experts, shared_expert_intermediate_size=size)


def _gemma(fields: Fields) -> Config:
    return _named("GemmaForCausalLM", "gemma", hidden_activation="gelu_pytorch_tanh")


def _gemma2(fields: Fields) -> Config:
    return _named(
        "Gemma2ForCausalLM", "gemma2", hidden_activation="gelu_pytorch_tanh",
        sliding_window=fields.get("attention.sliding_window", 4096),
        attn_logit_softcapping=fields.get("attn_logit_softcapping", 50.0),
        final_logit_softcapping=fields.get("final_logit_softcapping", 30.0),
        query_pre_attn_scalar=_query_scalar(fields, largest=46),
    )  # fmt: skip


def _gemma3(fields: Fields) -> Config:
    full = {"rope_type": "default", "rope_theta": fields.get("rope.freq_base", 1_000_000.0)}
    if fields.get("rope.scaling.type") == "linear":
        full |= {"rope_type": "linear", "factor": fields.need("rope.scaling.factor")}
    local = {"rope_type": "default", "rope_theta": fields.get("rope.freq_base_swa", 10_000.0)}
    pattern = fields.get("attention.sliding_window_pattern", 6)
    count = fields.need("block_count")
    has_window = pattern if isinstance(pattern, list) else [bool((index + 1) % pattern) for index in range(count)]
    return _named(
        "Gemma3ForCausalLM", "gemma3_text", hidden_activation="gelu_pytorch_tanh",
        sliding_window=fields.get("attention.sliding_window", 1024),
        layer_types=["sliding_attention" if each else "full_attention" for each in has_window],
        rope_parameters={"full_attention": full, "sliding_attention": local},
        final_logit_softcapping=fields.get("final_logit_softcapping"),
        query_pre_attn_scalar=_query_scalar(fields, largest=62),
    )  # fmt: skip


def _query_scalar(fields: Fields, largest: int) -> float:
    """Only the largest model of a generation, which is known by its number of layers, divides by another number than
    the size of a head."""
    if fields.need("block_count") == largest:
        return fields.need("embedding_length") / fields.need("attention.head_count")
    return fields.head_dim


def _phi3(fields: Fields) -> Config:
    window = fields.get("attention.sliding_window")
    return _named(
        "Phi3ForCausalLM", "phi3", hidden_act="silu", sliding_window=window or None, attention_bias=False,
        original_max_position_embeddings=fields.get("rope.scaling.original_context_length"),
    )  # fmt: skip


def _starcoder2(fields: Fields) -> Config:
    return _named(
        "Starcoder2ForCausalLM", "starcoder2", hidden_act="gelu_pytorch_tanh", use_bias=fields.has_attention_bias,
        norm_epsilon=fields.need("attention.layer_norm_epsilon"), sliding_window=None,
    )  # fmt: skip


def _granite(fields: Fields) -> Config:
    return _named(
        "GraniteForCausalLM", "granite", hidden_act="silu",
        attention_multiplier=fields.get("attention.scale", fields.head_dim**-0.5),
        embedding_multiplier=fields.get("embedding_scale", 1.0),
        residual_multiplier=fields.get("residual_scale", 1.0),
        logits_scaling=fields.get("logit_scale", 1.0),
    )  # fmt: skip


def _granitemoe(fields: Fields) -> Config:
    return {
        **_granite(fields),
        **_named("GraniteMoeForCausalLM", "granitemoe"),
        "num_local_experts": fields.need("expert_count"),
        "num_experts_per_tok": fields.need("expert_used_count"),
        "intermediate_size": fields.tensors["blk.0.ffn_gate_exps.weight"].shape[1],
    }


def _gpt_oss(fields: Fields) -> Config:
    return _named(
        "GptOssForCausalLM", "gpt_oss", hidden_act="silu", num_local_experts=fields.need("expert_count"),
        num_experts_per_tok=fields.need("expert_used_count"), sliding_window=fields.need("attention.sliding_window"),
        intermediate_size=fields.tensors["blk.0.ffn_gate_exps.weight"].shape[1],
    )  # fmt: skip


def _minimax_m2(fields: Fields) -> Config:
    return _named(
        "MiniMaxM2ForCausalLM", "minimax_m2", hidden_act="silu", num_local_experts=fields.need("expert_count"),
        num_experts_per_tok=fields.need("expert_used_count"),
        intermediate_size=fields.tensors["blk.0.ffn_gate_exps.weight"].shape[1],
    )  # fmt: skip


def _phimoe(fields: Fields) -> Config:
    return {
        **_phi3(fields),
        **_named("PhimoeForCausalLM", "phimoe"),
        "attention_bias": fields.has_attention_bias,
        "lm_head_bias": "output.bias" in fields.tensors,
        "num_local_experts": fields.need("expert_count"),
        "num_experts_per_tok": fields.need("expert_used_count"),
        "intermediate_size": fields.tensors["blk.0.ffn_gate_exps.weight"].shape[1],
    }


def _ernie4_5_moe(fields: Fields) -> Config:
    return _named(
        "Ernie4_5_MoeForCausalLM", "ernie4_5_moe", hidden_act="silu", moe_num_experts=fields.need("expert_count"),
        moe_k=fields.need("expert_used_count"), moe_intermediate_size=fields.need("expert_feed_forward_length"),
        moe_num_shared_experts=fields.get("expert_shared_count", 0),
        moe_layer_start_index=fields.get("leading_dense_block_count", 0),
        moe_layer_interval=fields.get("interleave_moe_layer_step", 1), use_bias=False,
    )  # fmt: skip


def _glm4moe(fields: Fields) -> Config:
    if fields.get("expert_group_count", 1) > 1:
        raise ConfigError(f"{fields.path} chooses experts by groups, which is not supported in GGUF files.")
    return _named(
        "Glm4MoeForCausalLM", "glm4_moe", hidden_act="silu", n_routed_experts=fields.need("expert_count"),
        num_experts_per_tok=fields.need("expert_used_count"), n_shared_experts=fields.get("expert_shared_count", 0),
        moe_intermediate_size=fields.need("expert_feed_forward_length"),
        first_k_dense_replace=fields.get("leading_dense_block_count", 0),
        norm_topk_prob=fields.get("expert_weights_norm", True),
        routed_scaling_factor=fields.get("expert_weights_scale", 1.0),
        use_qk_norm="blk.0.attn_q_norm.weight" in fields.tensors,
        num_hidden_layers=fields.need("block_count") - fields.get("nextn_predict_layers", 0),
    )  # fmt: skip


def _lfm2(fields: Fields) -> Config:
    heads = fields.get("attention.head_count_kv")
    if not isinstance(heads, list) or len(set(heads) - {0}) != 1:
        raise ConfigError(f"{fields.path} lacks lfm2.attention.head_count_kv for each layer. Convert it again.")
    return _named(
        "Lfm2ForCausalLM", "lfm2", norm_eps=fields.get("attention.layer_norm_rms_epsilon"),
        layer_types=["full_attention" if each else "conv" for each in heads],
        conv_L_cache=fields.need("shortconv.l_cache"), conv_bias=False, block_auto_adjust_ff_dim=False,
    )  # fmt: skip


def _olmo2(fields: Fields) -> Config:
    """OLMo 2, or OLMo 3, which has windows; only its layers without one stretch their rotation."""
    window = fields.get("attention.sliding_window")
    if not window:
        return _named("Olmo2ForCausalLM", "olmo2", hidden_act="silu")
    has_window = fields.get("attention.sliding_window_pattern") or [
        (index + 1) % 4 != 0 for index in range(fields.need("block_count"))
    ]
    full = make_rope(fields, {})
    return _named(
        "Olmo3ForCausalLM", "olmo3", hidden_act="silu", sliding_window=window,
        layer_types=["sliding_attention" if each else "full_attention" for each in has_window],
        rope_parameters={
            "full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": full["rope_theta"]},
        },
    )  # fmt: skip


def _cohere(fields: Fields) -> Config:
    return _named(
        "CohereForCausalLM", "cohere", hidden_act="silu", logit_scale=fields.need("logit_scale"),
        layer_norm_eps=fields.need("attention.layer_norm_epsilon"),
        use_qk_norm="blk.0.attn_q_norm.weight" in fields.tensors,
    )  # fmt: skip


def _cohere2(fields: Fields) -> Config:
    return _named(
        "Cohere2ForCausalLM", "cohere2", hidden_act="silu", logit_scale=fields.need("logit_scale"),
        layer_norm_eps=fields.need("attention.layer_norm_epsilon"),
        sliding_window=fields.need("attention.sliding_window"), sliding_window_pattern=4,
    )  # fmt: skip


ARCHITECTURES: Mapping[str, Callable[[Fields], Config]] = {
    "llama": _llama,
    "qwen2": lambda _: _named("Qwen2ForCausalLM", "qwen2", hidden_act="silu"),
    "qwen3": lambda _: _named("Qwen3ForCausalLM", "qwen3", hidden_act="silu"),
    "qwen2moe": _qwen2moe,
    "qwen3moe": lambda fields: _named("Qwen3MoeForCausalLM", "qwen3_moe", **_experts(fields), norm_topk_prob=True),
    "olmoe": lambda fields: _named("OlmoeForCausalLM", "olmoe", **_experts(fields), norm_topk_prob=False),
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "starcoder2": _starcoder2,
    "granite": _granite,
    "granitemoe": _granitemoe,
    "gpt-oss": _gpt_oss,
    "lfm2": _lfm2,
    "olmo2": _olmo2,
    "command-r": _cohere,
    "cohere2": _cohere2,
    "ernie4_5-moe": _ernie4_5_moe,
    "phimoe": _phimoe,
    "minimax-m2": _minimax_m2,
    "glm4moe": _glm4moe,
    "glm4": lambda _: _named("Glm4ForCausalLM", "glm4", hidden_act="silu"),
}
"""llama.cpp's name of an architecture → the fields of config.json that it adds."""
