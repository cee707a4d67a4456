"""The fields of config.json that architectures with recurrent layers add to those of all."""

from quire.core.errors import ConfigError
from quire.frontend.checkpoint.gguf.fields import Config, Fields, granite_multipliers, named
from quire.frontend.checkpoint.gguf.latent import latents


def lfm2(fields: Fields) -> Config:
    return named("Lfm2ForCausalLM", "lfm2", **_short_convolutions(fields), block_auto_adjust_ff_dim=False)


def lfm2_moe(fields: Fields) -> Config:
    return named(
        "Lfm2MoeForCausalLM", "lfm2_moe", **_short_convolutions(fields), num_experts=fields.need("expert_count"),
        num_experts_per_tok=fields.need("expert_used_count"),
        moe_intermediate_size=fields.need("expert_feed_forward_length"),
        num_dense_layers=fields.get("leading_dense_block_count", 0),
        use_expert_bias=fields.has_any("exp_probs_b.bias"),
        norm_topk_prob=fields.get("expert_weights_norm", True),
        routed_scaling_factor=fields.get("expert_weights_scale", 1.0),
    )  # fmt: skip


def _short_convolutions(fields: Fields) -> Config:
    heads = fields.get("attention.head_count_kv")
    if not isinstance(heads, list) or len(set(heads) - {0}) != 1:
        raise ConfigError(
            f"{fields.path} lacks {fields.architecture}.attention.head_count_kv for each layer. Convert it again."
        )
    return {
        "norm_eps": fields.get("attention.layer_norm_rms_epsilon"),
        "layer_types": ["full_attention" if each else "conv" for each in heads],
        "conv_L_cache": fields.need("shortconv.l_cache"),
        "conv_bias": False,
    }


def qwen3_next(fields: Fields) -> Config:
    return named("Qwen3NextForCausalLM", "qwen3_next", **_delta_rules(fields), **_mixtures(fields), norm_topk_prob=True)


def qwen3_5(fields: Fields) -> Config:
    return named("Qwen3_5ForCausalLM", "qwen3_5_text", **_delta_rules(fields))


def qwen3_5_moe(fields: Fields) -> Config:
    return named("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", **_delta_rules(fields), **_mixtures(fields))


def _mixtures(fields: Fields) -> Config:
    return {
        "num_experts": fields.need("expert_count"),
        "num_experts_per_tok": fields.need("expert_used_count"),
        "moe_intermediate_size": fields.need("expert_feed_forward_length"),
        "shared_expert_intermediate_size": fields.rows("ffn_gate_shexp.weight"),
    }


def _delta_rules(fields: Fields) -> Config:
    """The layers that predict further tokens, at the end, are left out."""
    heads, layers = (
        fields.need("ssm.time_step_rank"),
        fields.need("block_count") - fields.get("nextn_predict_layers", 0),
    )
    return {
        "hidden_act": "silu",
        "num_hidden_layers": layers,
        "layer_types": [
            "linear_attention" if fields.has(layer, "ssm_a") else "full_attention" for layer in range(layers)
        ],
        "linear_conv_kernel_dim": fields.need("ssm.conv_kernel"),
        "linear_num_value_heads": heads,
        "linear_num_key_heads": fields.need("ssm.group_count"),
        "linear_key_head_dim": fields.need("ssm.state_size"),
        "linear_value_head_dim": fields.need("ssm.inner_size") // heads,
    }


def granite_hybrid(fields: Fields) -> Config:
    """Granite 4; the network that all tokens share is the only one where there are no experts."""
    heads, experts = fields.need("ssm.time_step_rank"), fields.get("expert_count", 0)
    inner = fields.need("ssm.inner_size")
    return named(
        "GraniteMoeHybridForCausalLM", "granitemoehybrid", **granite_multipliers(fields),
        layer_types=["mamba" if fields.has(layer, "ssm_a") else "attention"
                     for layer in range(fields.need("block_count"))],
        mamba_n_heads=heads, mamba_d_head=inner // heads, mamba_n_groups=fields.need("ssm.group_count"),
        mamba_d_state=fields.need("ssm.state_size"), mamba_d_conv=fields.need("ssm.conv_kernel"),
        mamba_expand=inner // fields.need("embedding_length"),
        mamba_conv_bias=fields.has_any("ssm_conv1d.bias"), mamba_proj_bias=fields.has_any("ssm_in.bias"),
        num_local_experts=experts, num_experts_per_tok=fields.get("expert_used_count", 0),
        intermediate_size=fields.rows("ffn_up_exps.weight") or fields.rows("ffn_up.weight"),
        shared_intermediate_size=fields.rows("ffn_up_shexp.weight") or fields.rows("ffn_up.weight"),
        position_embedding_type="rope" if fields.get("rope.scaling.finetuned") else "nope",
    )  # fmt: skip


def kimi_linear(fields: Fields) -> Config:
    """Layers are counted from 1. Nothing rotates, and the latents' positions are only their size."""
    layers = range(fields.need("block_count"))
    attending = [layer + 1 for layer in layers if fields.has(layer, "attn_kv_a_mqa.weight")]
    head_dim = fields.need("kda.head_dim")
    own = {name: value for name, value in latents(fields).items() if name != "rope_parameters"}
    return named(
        "KimiLinearForCausalLM", "kimi_linear", **own, linear_attn_config={
            "full_attn_layers": attending, "kda_layers": [layer + 1 for layer in layers if layer + 1 not in attending],
            "head_dim": head_dim, "num_heads": fields.rows("ssm_f_b.weight") // head_dim,
            "short_conv_kernel_size": fields.need("ssm.conv_kernel"),
        },
        num_experts=fields.need("expert_count"), num_experts_per_token=fields.need("expert_used_count"),
        moe_intermediate_size=fields.need("expert_feed_forward_length"),
        num_shared_experts=fields.need("expert_shared_count"),
        first_k_dense_replace=fields.need("leading_dense_block_count"), moe_renormalize=True,
        routed_scaling_factor=fields.get("expert_weights_scale", 1.0),
        num_expert_group=fields.get("expert_group_count", 1), topk_group=fields.get("expert_group_used_count", 1),
    )  # fmt: skip


def nemotron_h(fields: Fields) -> Config:
    """Nemotron-H, and Nemotron 3, which has experts. A layer is what its tensors say."""
    own: Config = {}
    if fields.get("expert_count") and fields.has_any("ffn_up_exps.weight"):
        own = {
            "n_routed_experts": fields.need("expert_count"), "num_experts_per_tok": fields.need("expert_used_count"),
            "moe_intermediate_size": fields.rows("ffn_up_exps.weight"),
            "moe_shared_expert_intermediate_size": fields.rows("ffn_up_shexp.weight"),
            "moe_latent_size": fields.get("moe_latent_size"),
            "n_group": fields.get("expert_group_count", 1), "topk_group": fields.get("expert_group_used_count", 1),
            "norm_topk_prob": fields.get("expert_weights_norm", True),
            "routed_scaling_factor": fields.get("expert_weights_scale", 1.0),
        }  # fmt: skip
    heads = fields.need("ssm.time_step_rank")
    eps = fields.get("attention.layer_norm_rms_epsilon") or fields.need("attention.layer_norm_epsilon")
    return named(
        "NemotronHForCausalLM", "nemotron_h", **own, mlp_hidden_act="relu2", layer_norm_epsilon=eps,
        layers_block_type=[_kind(fields, layer) for layer in range(fields.need("block_count"))],
        intermediate_size=fields.rows("ffn_up.weight") or fields.rows("ffn_up_exps.weight"),
        mamba_num_heads=heads, mamba_head_dim=fields.need("ssm.inner_size") // heads,
        n_groups=fields.need("ssm.group_count"), ssm_state_size=fields.need("ssm.state_size"),
        conv_kernel=fields.need("ssm.conv_kernel"), use_conv_bias=fields.has_any("ssm_conv1d.bias"),
        use_bias=fields.has_any("ssm_in.bias"), mlp_bias=fields.has_any("ffn_up.bias"),
    )  # fmt: skip


def _kind(fields: Fields, layer: int) -> str:
    kinds = {"ssm_a": "mamba", "attn_q.weight": "attention", "ffn_up_exps.weight": "moe", "ffn_up.weight": "mlp"}
    for name, kind in kinds.items():
        if fields.has(layer, name):
            return kind
    raise ConfigError(f"{fields.path} has none of {', '.join(kinds)} in layer {layer}. Download it again.")
