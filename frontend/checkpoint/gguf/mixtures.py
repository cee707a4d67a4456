"""The fields of config.json that mixtures of experts add to those of all."""

from quire.core.errors import ConfigError
from quire.frontend.checkpoint.gguf.fields import Config, Fields, named, windows
from quire.frontend.checkpoint.gguf.rotation import make_rope

SIGMOID = 2
"""llama.cpp's number of a router's scores."""


def glm4_moe(fields: Fields) -> Config:
    """DeepSeek V3's experts with grouped-query attention; layers that predict further tokens are no part of these."""
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
        partial_rotary_factor=1.0,  # but for what the rotation says itself; GLM's default is half of a head
        num_hidden_layers=fields.need("block_count") - fields.get("nextn_predict_layers", 0),
    )  # fmt: skip


def hunyuan_moe(fields: Fields) -> Config:
    """Hunyuan A13B: experts with a dense network of the same size in parallel."""
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


_MIMO_VALUES = 0.707
"""What MiMo V2 Flash multiplies values by; llama.cpp's converter left it out until other models had other factors."""


def mimo2(fields: Fields) -> Config:
    """MiMo V2: layers with windows have twice the KV heads, and sinks. A file's window leaves out the token itself."""
    layers = fields.need("block_count") - fields.get("nextn_predict_layers", 0)
    has_window = [bool(each) for each in fields.by_layer("attention.sliding_window_pattern")[:layers]]
    types = ["sliding_attention" if each else "full_attention" for each in has_window]
    kv_heads = fields.by_layer("attention.head_count_kv")[:layers]
    full = kv_heads[has_window.index(False)] if False in has_window else kv_heads[0] // 2
    if kv_heads != [2 * full if each else full for each in has_window]:
        raise ConfigError(
            f"{fields.path}: layers with windows need twice the KV heads of the others, got {kv_heads}. Serve the "
            "repository that the file was made from."
        )
    rope = make_rope(fields)
    local = {**rope, "rope_theta": fields.get("rope.freq_base_swa", rope["rope_theta"])}
    return named(
        "MiMoV2FlashForCausalLM", "mimo_v2_flash", hidden_act="silu", num_hidden_layers=layers,
        num_key_value_heads=full, head_dim=fields.head_dim, v_head_dim=fields.need("attention.value_length"),
        sliding_window=fields.need("attention.sliding_window") + 1, layer_types=types,
        attention_value_scale=fields.get("attention.value_scale", _MIMO_VALUES),
        mlp_layer_types=["sparse" if fields.has(layer, "ffn_gate_inp.weight") else "dense" for layer in range(layers)],
        n_routed_experts=fields.need("expert_count"), num_experts_per_tok=fields.need("expert_used_count"),
        moe_intermediate_size=fields.need("expert_feed_forward_length"),
        norm_topk_prob=fields.get("expert_weights_norm", True),
        routed_scaling_factor=fields.get("expert_weights_scale", 1.0),
        n_group=fields.get("expert_group_count", 1), topk_group=fields.get("expert_group_used_count", 1),
        rope_parameters={"full_attention": rope, "sliding_attention": local}, pad_token_id=None,
    )  # fmt: skip
