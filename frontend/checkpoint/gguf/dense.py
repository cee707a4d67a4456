"""The fields of config.json that dense decoders without recurrent layers add to those of all."""

from quire.core.errors import ConfigError
from quire.frontend.checkpoint.gguf.fields import Config, Fields, granite_multipliers, named, windows
from quire.frontend.checkpoint.gguf.rotation import make_rope, with_temperatures

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
    """Layers with windows rotate."""
    own = windows(fields, fields.need("block_count"))
    return named("Exaone4ForCausalLM", "exaone4", hidden_act="silu", **own)


def stablelm(fields: Fields) -> Config:
    """Builds StableLM's fields. Raises ConfigError for StableLM 2 12B, which has a norm for each head."""
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
    """MiniCPM 1 and 2 are Granite's model with other names."""
    for name in ("embedding_scale", "residual_scale", "logit_scale"):
        fields.need(name)
    return named("GraniteForCausalLM", "granite", **granite_multipliers(fields))


def mistral3(fields: Fields) -> Config:
    """Ministral 3, whose queries grow with their positions, or Mistral Small 3.1 and 3.2, which are Llama's model."""
    rope = make_rope(fields)
    if log := fields.get("rope.scaling.yarn_log_multiplier"):
        rope = with_temperatures(rope, 1.0, log)  # 1: llama.cpp's code says it, not the file
    beta = fields.get("attention.temperature_scale")
    if not beta:
        return named("LlamaForCausalLM", "llama", hidden_act="silu", rope_parameters=rope)
    rope["llama_4_scaling_beta"] = beta
    return named("Ministral3ForCausalLM", "ministral3", hidden_act="silu", sliding_window=None, rope_parameters=rope)


def arcee(_: Fields) -> Config:
    return named("ArceeForCausalLM", "arcee", hidden_act="relu2")


def bloom(fields: Fields) -> Config:
    return named(
        "BloomForCausalLM", "bloom", n_layer=fields.need("block_count"), n_head=fields.num_heads,
        layer_norm_epsilon=fields.need("attention.layer_norm_epsilon"), pad_token_id=None,
    )  # fmt: skip


def apertus(_: Fields) -> Config:
    return named("ApertusForCausalLM", "apertus", hidden_act="xielu", pad_token_id=None)


def chatglm(fields: Fields) -> Config:
    """GLM-4 of 2024, and ChatGLM 2 and 3."""
    return named("GlmForCausalLM", "glm", hidden_act="silu", pad_token_id=None)


def phi2(fields: Fields) -> Config:
    """Phi 1, 1.5 and 2."""
    return named(
        "PhiForCausalLM", "phi", hidden_act="gelu_new", layer_norm_eps=fields.need("attention.layer_norm_epsilon"),
        qk_layernorm=False,
    )  # fmt: skip


def gpt_neox(fields: Fields) -> Config:
    return named(
        "GPTNeoXForCausalLM", "gpt_neox", hidden_act="gelu", layer_norm_eps=fields.need("attention.layer_norm_epsilon"),
        use_parallel_residual=fields.get("use_parallel_residual", True),
        attention_bias=fields.has_any("attn_qkv.bias"),
    )  # fmt: skip


def nemotron(fields: Fields) -> Config:
    """Nemotron 3 and 4, and Minitron."""
    return named(
        "NemotronForCausalLM", "nemotron", hidden_act="relu2", norm_eps=fields.need("attention.layer_norm_epsilon")
    )


def olmo(fields: Fields) -> Config:
    return named("OlmoForCausalLM", "olmo", hidden_act="silu", clip_qkv=fields.get("attention.clamp_kqv"))


def starcoder(fields: Fields) -> Config:
    return named(
        "GPTBigCodeForCausalLM", "gpt_bigcode", activation_function="gelu_pytorch_tanh", multi_query=True,
        n_embd=fields.need("embedding_length"), n_inner=fields.need("feed_forward_length"),
        layer_norm_epsilon=fields.need("attention.layer_norm_epsilon"), pad_token_id=None,
    )  # fmt: skip
