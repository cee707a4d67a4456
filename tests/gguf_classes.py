"""Architectures of llama.cpp that classes of Transformers compute, or models of other names here."""

from typing import Any

from transformers import (
    AfmoeConfig,
    ApertusConfig,
    ArceeConfig,
    BloomConfig,
    Ernie4_5Config,
    Exaone4Config,
    ExaoneMoeConfig,
    GPTBigCodeConfig,
    GraniteConfig,
    HunYuanDenseV1Config,
    HunYuanMoEV1Config,
    LlamaConfig,
    MiMoV2FlashConfig,
    Ministral3Config,
    NemotronConfig,
    OlmoConfig,
    PhiConfig,
    PretrainedConfig,
    SeedOssConfig,
    SmolLM3Config,
    StableLmConfig,
)

WINDOWS = [True, False] * 2
TYPES = ["sliding_attention", "full_attention"] * 2

MIMO: dict[str, Any] = {
    "num_key_value_heads": 1, "head_dim": 24, "v_head_dim": 16, "sliding_window": 5,
    "layer_types": ["full_attention", "sliding_attention"] * 2, "mlp_layer_types": ["dense"] + ["sparse"] * 3,
    "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "routed_scaling_factor": None,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.334},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.334},
    },
}  # fmt: skip
MIMO_METADATA: dict[str, Any] = {
    "attention.key_length": 24, "attention.value_length": 16, "attention.head_count_kv": [1, 2, 1, 2],
    "attention.sliding_window": 4, "attention.sliding_window_pattern": [False, True] * 2, "expert_count": 6,
    "expert_used_count": 2, "expert_feed_forward_length": 32, "rope.dimension_count": 8, "rope.freq_base": 5e6,
    "rope.freq_base_swa": 1e4, "attention.layer_norm_rms_epsilon": 1e-5, "expert_group_count": 1,
    "expert_group_used_count": 1,
}  # fmt: skip

BY_CLASSES: dict[str, tuple[type[PretrainedConfig], str, str, dict[str, Any], dict[str, Any]]] = {
    "smollm3": (
        SmolLM3Config,
        "SmolLM3ForCausalLM",
        "smollm3",
        {"tie_word_embeddings": True},
        {"rope.freq_base": 2e6},
    ),
    "seed-oss": (
        SeedOssConfig,
        "SeedOssForCausalLM",
        "seed_oss",
        {"head_dim": 24, "attention_dropout": 0.0, "residual_dropout": 0.0},
        {"attention.key_length": 24, "attention.value_length": 24},
    ),
    "exaone4": (
        Exaone4Config,
        "Exaone4ForCausalLM",
        "exaone4",
        {"sliding_window": 4, "layer_types": TYPES},
        {
            "attention.sliding_window": 4, "attention.sliding_window_pattern": WINDOWS,
            "attention.layer_norm_rms_epsilon": 1e-5,
        },
    ),
    "stablelm": (
        StableLmConfig,
        "StableLmForCausalLM",
        "stablelm",
        {"use_qkv_bias": True},
        {"attention.layer_norm_epsilon": 1e-5, "attention.layer_norm_rms_epsilon": None, "rope.dimension_count": 4},
    ),
    "ernie4-5": (
        Ernie4_5Config,
        "Ernie4_5ForCausalLM",
        "ernie4_5",
        {"head_dim": 24, "tie_word_embeddings": True},
        {
            "attention.key_length": 24, "attention.value_length": 24, "rope.freq_base": 500000.0,
            "attention.layer_norm_rms_epsilon": 1e-5,
        },
    ),
    "hunyuan-dense": (
        HunYuanDenseV1Config,
        "HunYuanDenseV1ForCausalLM",
        "hunyuan-dense",
        {"head_dim": 24},
        {"attention.key_length": 24, "attention.value_length": 24, "attention.layer_norm_rms_epsilon": 1e-5},
    ),
    "minicpm": (
        GraniteConfig,
        "GraniteForCausalLM",
        "minicpm",
        {"embedding_multiplier": 12.0, "attention_multiplier": 0.25, "residual_multiplier": 0.7, "logits_scaling": 2.0},
        {"embedding_scale": 12.0, "residual_scale": 0.7, "logit_scale": 2.0},
    ),
    "ministral3": (
        Ministral3Config,
        "Ministral3ForCausalLM",
        "mistral3",
        {
            "head_dim": 24,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 4,
                "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.7, "llama_4_scaling_beta": 0.5,
            },
        },
        {
            "attention.key_length": 24, "attention.value_length": 24, "rope.dimension_count": 24,
            "rope.freq_base": 1e6, "rope.scaling.type": "yarn", "rope.scaling.factor": 16.0,
            "rope.scaling.original_context_length": 4, "rope.scaling.yarn_beta_fast": 32.0,
            "rope.scaling.yarn_beta_slow": 1.0, "rope.scaling.yarn_log_multiplier": 0.7,
            "attention.temperature_scale": 0.5, "attention.layer_norm_rms_epsilon": 1e-5,
        },
    ),
    "mistral-small": (LlamaConfig, "LlamaForCausalLM", "mistral3", {"head_dim": 24}, {"attention.key_length": 24,
                      "attention.value_length": 24, "rope.dimension_count": 24}),
    "internlm2": (LlamaConfig, "LlamaForCausalLM", "internlm2", {}, {}),
    "exaone": (LlamaConfig, "LlamaForCausalLM", "exaone", {}, {"rope.dimension_count": 16}),
    "apertus": (
        ApertusConfig,
        "ApertusForCausalLM",
        "apertus",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        {"attention.layer_norm_rms_epsilon": 1e-5},
    ),
    "arcee": (ArceeConfig, "ArceeForCausalLM", "arcee", {}, {"attention.layer_norm_rms_epsilon": 1e-5}),
    "phi2": (
        PhiConfig,
        "PhiForCausalLM",
        "phi2",
        {"num_key_value_heads": 4, "intermediate_size": 256, "rope_parameters": {"rope_type": "default",
         "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {
            "attention.head_count_kv": 4, "attention.layer_norm_epsilon": 1e-5, "rope.dimension_count": 8,
            "attention.layer_norm_rms_epsilon": None, "rope.freq_base": None, "feed_forward_length": 256,
        },
    ),
    "hunyuan-moe": (
        HunYuanMoEV1Config,
        "HunYuanMoEV1ForCausalLM",
        "hunyuan-moe",
        {"head_dim": 24, "num_experts": 6, "moe_topk": 2},
        {
            "attention.key_length": 24, "attention.value_length": 24, "attention.layer_norm_rms_epsilon": 1e-5,
            "expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 96,
            "expert_shared_feed_forward_length": 96, "expert_shared_count": 1,
        },
    ),
    "exaone-moe": (
        ExaoneMoeConfig,
        "ExaoneMoeForCausalLM",
        "exaone-moe",
        {
            "head_dim": 24, "sliding_window": 4, "layer_types": TYPES, "first_k_dense_replace": 1, "num_experts": 6,
            "num_experts_per_tok": 2, "moe_intermediate_size": 40, "num_shared_experts": 2,
        },
        {
            "attention.key_length": 24, "attention.value_length": 24, "attention.layer_norm_rms_epsilon": 1e-5,
            "attention.sliding_window": 4, "attention.sliding_window_pattern": WINDOWS, "expert_count": 6,
            "expert_used_count": 2, "expert_feed_forward_length": 40, "expert_shared_feed_forward_length": 80,
            "expert_shared_count": 2, "expert_weights_scale": 2.5, "expert_weights_norm": True,
            "leading_dense_block_count": 1, "expert_gating_func": 2, "nextn_predict_layers": 0,
        },
    ),
    "afmoe": (
        AfmoeConfig,
        "AfmoeForCausalLM",
        "afmoe",
        {
            "head_dim": 24, "sliding_window": 4, "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "num_dense_layers": 1, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
            "num_shared_experts": 2, "route_scale": 1.5, "mup_enabled": True,
        },
        {
            "attention.key_length": 24, "attention.value_length": 24, "attention.layer_norm_rms_epsilon": 1e-5,
            "attention.sliding_window": 4, "expert_count": 6, "expert_used_count": 2, "expert_shared_count": 2,
            "expert_feed_forward_length": 40, "expert_weights_scale": 1.5, "expert_weights_norm": True,
            "leading_dense_block_count": 1, "expert_gating_func": 2, "rope.dimension_count": 24,
        },
    ),
    "bloom": (
        BloomConfig,
        "BloomForCausalLM",
        "bloom",
        {"n_layer": 4, "n_head": 4, "tie_word_embeddings": True},
        {
            "attention.head_count_kv": 4, "attention.layer_norm_epsilon": 1e-5, "rope.freq_base": None,
            "attention.layer_norm_rms_epsilon": None, "feed_forward_length": 256,
        },
    ),
    "mimo-v2-flash": (MiMoV2FlashConfig, "MiMoV2FlashForCausalLM", "mimo2", MIMO, MIMO_METADATA),
    "mimo-v2.5": (
        MiMoV2FlashConfig,
        "MiMoV2FlashForCausalLM",
        "mimo2",
        {**MIMO, "attention_value_scale": 0.6},
        {
            **MIMO_METADATA, "attention.value_scale": 0.6, "nextn_predict_layers": 1, "block_count": 5,
            "attention.sliding_window_pattern": [False, True, False, True, True],
            "attention.head_count_kv": [1, 2, 1, 2, 2],
        },
    ),
    "starcoder": (
        GPTBigCodeConfig,
        "GPTBigCodeForCausalLM",
        "starcoder",
        {"tie_word_embeddings": True},
        {
            "attention.head_count_kv": 1, "attention.layer_norm_epsilon": 1e-5, "rope.freq_base": None,
            "attention.layer_norm_rms_epsilon": None, "feed_forward_length": 256,
        },
    ),
    "nemotron": (
        NemotronConfig,
        "NemotronForCausalLM",
        "nemotron",
        {"head_dim": None},
        {"attention.layer_norm_epsilon": 1e-5, "attention.layer_norm_rms_epsilon": None, "rope.dimension_count": 8,
         "rope.scaling.type": "none"},
    ),
    "olmo": (
        OlmoConfig,
        "OlmoForCausalLM",
        "olmo",
        {"clip_qkv": 0.5},
        {"attention.layer_norm_epsilon": 1e-5, "attention.layer_norm_rms_epsilon": None, "attention.clamp_kqv": 0.5},
    ),
}  # fmt: skip
"""(the configuration's class, the model's, llama.cpp's architecture, options, what the converter writes): models that
have no file here, and one that goes by another name."""
