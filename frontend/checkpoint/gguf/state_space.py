"""The fields of config.json that Mamba, its successors and their hybrids add to those of all."""

from collections.abc import Sequence

from quire.core.errors import ConfigError
from quire.frontend.checkpoint.gguf.fields import Config, Fields, named

_NO_ATTENTION: Config = dict.fromkeys(
    ("num_attention_heads", "num_key_value_heads", "head_dim", "attention_bias", "mlp_bias", "rope_parameters")
)
"""Fields that models with neither attention nor feed-forward networks lack."""


def mamba(fields: Fields) -> Config:
    """Mamba, or Falcon Mamba, which normalizes a token's dt, b and c."""
    eps, inner = fields.need("attention.layer_norm_rms_epsilon"), fields.need("ssm.inner_size")
    is_normal = fields.get("ssm.dt_b_c_rms", False)
    architecture = ("FalconMambaForCausalLM", "falcon_mamba") if is_normal else ("MambaForCausalLM", "mamba")
    return named(
        *architecture, **_NO_ATTENTION, hidden_act="silu", intermediate_size=inner,
        layer_norm_epsilon=eps, state_size=fields.need("ssm.state_size"), conv_kernel=fields.need("ssm.conv_kernel"),
        time_step_rank=fields.need("ssm.time_step_rank"), expand=inner // fields.need("embedding_length"),
        use_bias=fields.has_any("ssm_in.bias"), use_conv_bias=fields.has_any("ssm_conv1d.bias"),
    )  # fmt: skip


def mamba2(fields: Fields) -> Config:
    heads, inner = fields.need("ssm.time_step_rank"), fields.need("ssm.inner_size")
    return named(
        "Mamba2ForCausalLM", "mamba2", **{**_NO_ATTENTION, "head_dim": inner // heads}, hidden_act="silu",
        intermediate_size=inner, layer_norm_epsilon=fields.need("attention.layer_norm_rms_epsilon"), num_heads=heads,
        n_groups=fields.need("ssm.group_count"), state_size=fields.need("ssm.state_size"),
        conv_kernel=fields.need("ssm.conv_kernel"), expand=inner // fields.need("embedding_length"),
        use_bias=fields.has_any("ssm_in.bias"), use_conv_bias=fields.has_any("ssm_conv1d.bias"),
    )  # fmt: skip


def falcon_h1(fields: Fields) -> Config:
    """The multipliers are part of the file's weights."""
    heads, inner = fields.need("ssm.time_step_rank"), fields.need("ssm.inner_size")
    return named(
        "FalconH1ForCausalLM", "falcon_h1", hidden_act="silu", mamba_d_ssm=inner, mamba_n_heads=heads,
        mamba_d_head=inner // heads, mamba_n_groups=fields.need("ssm.group_count"),
        mamba_d_state=fields.need("ssm.state_size"), mamba_d_conv=fields.need("ssm.conv_kernel"),
        mamba_rms_norm=fields.has_any("ssm_norm.weight"), mamba_norm_before_gate=False,
        mamba_conv_bias=fields.has_any("ssm_conv1d.bias"), mamba_proj_bias=fields.has_any("ssm_in.bias"),
        projectors_bias=fields.has_any("ssm_out.bias"),
    )  # fmt: skip


def jamba(fields: Fields) -> Config:
    layers = range(fields.need("block_count"))
    attending = _spacing(fields, [layer for layer in layers if fields.has(layer, "attn_q.weight")])
    sparse = _spacing(fields, [layer for layer in layers if fields.has(layer, "ffn_gate_inp.weight")])
    inner, size = fields.need("ssm.inner_size"), fields.need("embedding_length")
    return named(
        "JambaForCausalLM", "jamba", hidden_act="silu", attn_layer_period=attending[0], attn_layer_offset=attending[1],
        expert_layer_period=sparse[0], expert_layer_offset=sparse[1], num_experts=fields.get("expert_count", 0),
        num_experts_per_tok=fields.get("expert_used_count", 0), mamba_d_state=fields.need("ssm.state_size"),
        mamba_d_conv=fields.need("ssm.conv_kernel"), mamba_expand=inner // size,
        mamba_dt_rank=fields.need("ssm.time_step_rank"), mamba_conv_bias=fields.has_any("ssm_conv1d.bias"),
        mamba_proj_bias=fields.has_any("ssm_in.bias"),
    )  # fmt: skip


def _spacing(fields: Fields, layers: Sequence[int]) -> tuple[int, int]:
    """(period, offset) of the layers of one kind.

    Raises:
        ConfigError: they are not equally far from each other.
    """
    count = fields.need("block_count")
    offset = layers[0] if layers else count
    period = layers[1] - layers[0] if len(layers) > 1 else count + 1
    if list(range(offset, count, period)) != list(layers):
        raise ConfigError(f"{fields.path}: layers {list(layers)} are not at equal distances. Convert it again.")
    return period, offset
