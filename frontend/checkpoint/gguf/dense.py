"""The fields of config.json that dense decoders without recurrent layers add to those of all."""

from quire.core.errors import ConfigError
from quire.frontend.checkpoint.gguf.fields import Config, Fields, granite_multipliers, named

_NO_ROPE_INTERVAL = 4
"""Every such layer of SmolLM3 does not rotate; llama.cpp's code says it, not the file."""


def smollm3(fields: Fields) -> Config:
    return named(
        "SmolLM3ForCausalLM", "smollm3", hidden_act="silu", no_rope_layer_interval=_NO_ROPE_INTERVAL, pad_token_id=None
    )


def seed_oss(fields: Fields) -> Config:
    return named(
        "SeedOssForCausalLM", "seed_oss", hidden_act="silu", attention_out_bias=fields.has_any("attn_output.bias"),
        residual_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip


def exaone4(fields: Fields) -> Config:
    """Layers with windows rotate; where the file has no list of them, all but every fourth have one."""
    window = fields.get("attention.sliding_window") or None
    pattern = fields.get("attention.sliding_window_pattern") or [
        (index + 1) % 4 != 0 for index in range(fields.need("block_count"))
    ]
    return named(
        "Exaone4ForCausalLM", "exaone4", hidden_act="silu", sliding_window=window,
        layer_types=["sliding_attention" if window and each else "full_attention" for each in pattern],
    )  # fmt: skip


def stablelm(fields: Fields) -> Config:
    """Raises ConfigError for StableLM 2 12B, whose heads each have a norm of their own."""
    if fields.has_any("attn_q_norm.weight"):
        raise ConfigError(
            f"{fields.path}: norms of each head of queries and keys are not supported in GGUF files of StableLM. Serve "
            "the repository that the file was made from."
        )
    return named(
        "StableLmForCausalLM", "stablelm", hidden_act="silu", use_qkv_bias=fields.has_attention_bias,
        layer_norm_eps=fields.need("attention.layer_norm_epsilon"),
        use_parallel_residual=not fields.has_any("ffn_norm.weight"),
    )  # fmt: skip


def ernie4_5(fields: Fields) -> Config:
    return named(
        "Ernie4_5ForCausalLM", "ernie4_5", hidden_act="silu", use_bias=fields.has_attention_bias, pad_token_id=None
    )


def hunyuan_dense(fields: Fields) -> Config:
    return named("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", hidden_act="silu", pad_token_id=None)


def minicpm(fields: Fields) -> Config:
    """MiniCPM 1 and 2 are Granite's model under names of their own."""
    for name in ("embedding_scale", "residual_scale", "logit_scale"):
        fields.need(name)
    return named("GraniteForCausalLM", "granite", **granite_multipliers(fields))
