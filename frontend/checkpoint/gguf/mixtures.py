"""The fields of config.json that mixtures of experts add to those of all."""

from quire.core.errors import ConfigError
from quire.frontend.checkpoint.gguf.fields import Config, Fields, named, windows

SIGMOID = 2
"""llama.cpp's number of a router's scores."""


def glm4_moe(fields: Fields) -> Config:
    """DeepSeek V3's experts with grouped-query attention; layers that predict further tokens are left out."""
    if fields.get("expert_gating_func", SIGMOID) != SIGMOID:
        raise ConfigError(f"{fields.path}: a router of {fields.architecture} without sigmoids is not supported.")
    size = fields.need("expert_feed_forward_length")
    return named(
        "Glm4MoeForCausalLM", "glm4_moe", hidden_act="silu", n_routed_experts=fields.need("expert_count"),
        num_experts_per_tok=fields.need("expert_used_count"),
        n_shared_experts=(fields.rows("ffn_up_shexp.weight") or 0) // size, moe_intermediate_size=size,
        first_k_dense_replace=fields.get("leading_dense_block_count", 0),
        norm_topk_prob=fields.get("expert_weights_norm", True),
        routed_scaling_factor=fields.get("expert_weights_scale", 1.0),
        n_group=fields.get("expert_group_count", 1), topk_group=fields.get("expert_group_used_count", 1),
        use_qk_norm=fields.has_any("attn_q_norm.weight"),
        num_hidden_layers=fields.need("block_count") - fields.get("nextn_predict_layers", 0),
    )  # fmt: skip


def hunyuan_moe(fields: Fields) -> Config:
    """Hunyuan A13B: a dense network beside the experts, as large as each of them."""
    if fields.rows("ffn_up_shexp.weight") != fields.rows("ffn_up_exps.weight"):
        raise ConfigError(f"{fields.path}: a shared expert of another size than the others is not supported.")
    return named(
        "HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe", hidden_act="silu", num_experts=fields.need("expert_count"),
        moe_topk=fields.need("expert_used_count"), intermediate_size=fields.rows("ffn_up_exps.weight"),
        pad_token_id=None,
    )  # fmt: skip


def exaone_moe(fields: Fields) -> Config:
    """K-EXAONE: the layers of EXAONE 4, which rotate where they have windows, and the experts of DeepSeek V3."""
    size, dense = fields.need("expert_feed_forward_length"), fields.get("leading_dense_block_count", 0)
    layers = fields.need("block_count") - fields.get("nextn_predict_layers", 0)
    return named(
        "ExaoneMoeForCausalLM", "exaone_moe", hidden_act="silu", **windows(fields, layers), num_hidden_layers=layers,
        mlp_layer_types=["dense" if layer < dense else "sparse" for layer in range(layers)],
        moe_intermediate_size=size, num_experts=fields.need("expert_count"),
        num_experts_per_tok=fields.need("expert_used_count"),
        num_shared_experts=(fields.rows("ffn_up_shexp.weight") or 0) // size,
        norm_topk_prob=fields.get("expert_weights_norm", True),
        routed_scaling_factor=fields.get("expert_weights_scale", 1.0),
        n_group=fields.get("expert_group_count", 1), topk_group=fields.get("expert_group_used_count", 1),
        pad_token_id=None,
    )  # fmt: skip


def deepseek(fields: Fields) -> Config:
    """DeepSeek MoE 16B, and Ling 1."""
    size = fields.need("expert_feed_forward_length")
    return named(
        "DeepseekForCausalLM", "deepseek", hidden_act="silu", n_routed_experts=fields.need("expert_count"),
        num_experts_per_tok=fields.need("expert_used_count"), moe_intermediate_size=size,
        n_shared_experts=(fields.rows("ffn_up_shexp.weight") or 0) // size,
        first_k_dense_replace=fields.get("leading_dense_block_count", 0),
        norm_topk_prob=fields.get("expert_weights_norm", False),
        routed_scaling_factor=fields.get("expert_weights_scale", 1.0),
    )  # fmt: skip


def afmoe(fields: Fields) -> Config:
    """Trinity: embeddings are multiplied, which llama.cpp's code says, and not the file."""
    return named(
        "AfmoeForCausalLM", "afmoe", hidden_act="silu", **windows(fields, fields.need("block_count")), mup_enabled=True,
        num_experts=fields.need("expert_count"), num_experts_per_tok=fields.need("expert_used_count"),
        moe_intermediate_size=fields.need("expert_feed_forward_length"),
        num_shared_experts=fields.get("expert_shared_count", 0),
        num_dense_layers=fields.get("leading_dense_block_count", 0),
        route_scale=fields.get("expert_weights_scale", 1.0),
    )  # fmt: skip
