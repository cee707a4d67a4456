"""The fields of config.json that each architecture of llama.cpp adds to those of all.

Includes the constants that llama.cpp fixes in its code for an architecture, and that no file has.
"""

from collections.abc import Callable, Mapping

from quire.frontend.checkpoint.gguf.dense import (
    apertus,
    arcee,
    bloom,
    chatglm,
    ernie4_5,
    exaone4,
    gpt_neox,
    hunyuan_dense,
    minicpm,
    mistral3,
    nemotron,
    olmo,
    phi2,
    seed_oss,
    smollm3,
    stablelm,
    starcoder,
)
from quire.frontend.checkpoint.gguf.fields import Config, Fields, granite_multipliers, named
from quire.frontend.checkpoint.gguf.gemma import gemma, gemma2, gemma3, gemma3n, gemma4
from quire.frontend.checkpoint.gguf.hybrids import (
    granite_hybrid,
    kimi_linear,
    lfm2,
    lfm2_moe,
    nemotron_h,
    qwen3_5,
    qwen3_5_moe,
    qwen3_next,
)
from quire.frontend.checkpoint.gguf.latent import deepseek2, glm_dsa, minicpm3, mistral4
from quire.frontend.checkpoint.gguf.mixtures import afmoe, deepseek, exaone_moe, glm4_moe, hunyuan_moe, mimo2
from quire.frontend.checkpoint.gguf.rotation import make_rope
from quire.frontend.checkpoint.gguf.state_space import falcon_h1, jamba, mamba, mamba2


def _llama(fields: Fields) -> Config:
    if fields.get("expert_count"):
        return named(
            "MixtralForCausalLM", "mixtral", num_local_experts=fields.need("expert_count"),
            num_experts_per_tok=fields.need("expert_used_count"),
        )  # fmt: skip
    return _plain_llama(fields)


def _plain_llama(_: Fields) -> Config:
    return named("LlamaForCausalLM", "llama", hidden_act="silu")


def _qwen2(_: Fields) -> Config:
    """Also the text of Qwen VL, where a token of text has one position for all sections of its rotation."""
    return named("Qwen2ForCausalLM", "qwen2", hidden_act="silu")


def _qwen3(_: Fields) -> Config:
    return named("Qwen3ForCausalLM", "qwen3", hidden_act="silu")


def _qwen3moe(fields: Fields) -> Config:
    return named("Qwen3MoeForCausalLM", "qwen3_moe", **_experts(fields), norm_topk_prob=True)


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
    return named("Qwen2MoeForCausalLM", "qwen2_moe", **experts, shared_expert_intermediate_size=size)


def _phi3(fields: Fields) -> Config:
    window = fields.get("attention.sliding_window")
    return named(
        "Phi3ForCausalLM", "phi3", hidden_act="silu", sliding_window=window or None, attention_bias=False,
        original_max_position_embeddings=fields.get("rope.scaling.original_context_length"),
    )  # fmt: skip


def _starcoder2(fields: Fields) -> Config:
    return named(
        "Starcoder2ForCausalLM", "starcoder2", hidden_act="gelu_pytorch_tanh", use_bias=fields.has_attention_bias,
        norm_epsilon=fields.need("attention.layer_norm_epsilon"), sliding_window=None,
    )  # fmt: skip


def _granite(fields: Fields) -> Config:
    return named("GraniteForCausalLM", "granite", **granite_multipliers(fields))


def _granitemoe(fields: Fields) -> Config:
    return {
        **_granite(fields),
        **named("GraniteMoeForCausalLM", "granitemoe"),
        "num_local_experts": fields.need("expert_count"),
        "num_experts_per_tok": fields.need("expert_used_count"),
        "intermediate_size": fields.tensors["blk.0.ffn_gate_exps.weight"].shape[1],
    }


def _gpt_oss(fields: Fields) -> Config:
    return named(
        "GptOssForCausalLM", "gpt_oss", hidden_act="silu", num_local_experts=fields.need("expert_count"),
        num_experts_per_tok=fields.need("expert_used_count"), sliding_window=fields.need("attention.sliding_window"),
        intermediate_size=fields.tensors["blk.0.ffn_gate_exps.weight"].shape[1],
        rope_parameters={**make_rope(fields), "truncate": False},  # as the model was trained
    )  # fmt: skip


def _minimax_m2(fields: Fields) -> Config:
    return named(
        "MiniMaxM2ForCausalLM", "minimax_m2", hidden_act="silu", num_local_experts=fields.need("expert_count"),
        num_experts_per_tok=fields.need("expert_used_count"),
        intermediate_size=fields.tensors["blk.0.ffn_gate_exps.weight"].shape[1],
    )  # fmt: skip


def _phimoe(fields: Fields) -> Config:
    return {
        **_phi3(fields),
        **named("PhimoeForCausalLM", "phimoe"),
        "attention_bias": fields.has_attention_bias,
        "lm_head_bias": "output.bias" in fields.tensors,
        "num_local_experts": fields.need("expert_count"),
        "num_experts_per_tok": fields.need("expert_used_count"),
        "intermediate_size": fields.tensors["blk.0.ffn_gate_exps.weight"].shape[1],
    }


def _ernie4_5_moe(fields: Fields) -> Config:
    return named(
        "Ernie4_5_MoeForCausalLM", "ernie4_5_moe", hidden_act="silu", moe_num_experts=fields.need("expert_count"),
        moe_k=fields.need("expert_used_count"), moe_intermediate_size=fields.need("expert_feed_forward_length"),
        moe_num_shared_experts=fields.get("expert_shared_count", 0),
        moe_layer_start_index=fields.get("leading_dense_block_count", 0),
        moe_layer_interval=fields.get("interleave_moe_layer_step", 1), use_bias=False,
    )  # fmt: skip


def _olmo2(fields: Fields) -> Config:
    """OLMo 2, or OLMo 3, which has windows; only its layers without one stretch their rotation."""
    window = fields.get("attention.sliding_window")
    if not window:
        return named("Olmo2ForCausalLM", "olmo2", hidden_act="silu")
    has_window = fields.get("attention.sliding_window_pattern") or [
        (index + 1) % 4 != 0 for index in range(fields.need("block_count"))
    ]
    full = make_rope(fields)
    return named(
        "Olmo3ForCausalLM", "olmo3", hidden_act="silu", sliding_window=window,
        layer_types=["sliding_attention" if each else "full_attention" for each in has_window],
        rope_parameters={
            "full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": full["rope_theta"]},
        },
    )  # fmt: skip


def _cohere(fields: Fields) -> Config:
    return named(
        "CohereForCausalLM", "cohere", hidden_act="silu", logit_scale=fields.need("logit_scale"),
        layer_norm_eps=fields.need("attention.layer_norm_epsilon"),
        use_qk_norm="blk.0.attn_q_norm.weight" in fields.tensors,
    )  # fmt: skip


def _cohere2(fields: Fields) -> Config:
    return named(
        "Cohere2ForCausalLM", "cohere2", hidden_act="silu", logit_scale=fields.need("logit_scale"),
        layer_norm_eps=fields.need("attention.layer_norm_epsilon"),
        sliding_window=fields.need("attention.sliding_window"), sliding_window_pattern=4,
    )  # fmt: skip


def _gpt2(fields: Fields) -> Config:
    return named(
        "GPT2LMHeadModel", "gpt2", activation_function="gelu_new", n_embd=fields.need("embedding_length"),
        n_inner=fields.need("feed_forward_length"), layer_norm_epsilon=fields.need("attention.layer_norm_epsilon"),
    )  # fmt: skip


def _falcon(fields: Fields) -> Config:
    """Falcon 7B is a case of its successors, with one KV head and one norm a layer."""
    return named(
        "FalconForCausalLM", "falcon", new_decoder_architecture=True, num_kv_heads=fields.num_kv_heads,
        num_ln_in_parallel_attn=2 if fields.has(0, "attn_norm_2.weight") else 1, bias=False, alibi=False,
        ffn_hidden_size=fields.need("feed_forward_length"),
        layer_norm_epsilon=fields.need("attention.layer_norm_epsilon"),
    )  # fmt: skip


_NORMLESS_EXPERTS = 128
"""Experts of Llama 4 Maverick, whose queries and keys are not normalized."""


def _llama4(fields: Fields) -> Config:
    """Every fourth layer sees all tokens, and does not rotate; a file of a model without chunks says a window of 0."""
    chunk, layers = fields.get("attention.sliding_window", 8192), range(1, fields.need("block_count") + 1)
    return named(
        "Llama4ForCausalLM", "llama4_text", hidden_act="silu", attention_chunk_size=chunk or None,
        no_rope_layers=[int(not chunk or layer % 4 != 0) for layer in layers],
        layer_types=["chunked_attention" if chunk and layer % 4 else "full_attention" for layer in layers],
        use_qk_norm=fields.get("expert_count") != _NORMLESS_EXPERTS, attn_temperature_tuning=True,
        interleave_moe_layer_step=fields.get("interleave_moe_layer_step", 1),
        intermediate_size_mlp=fields.need("feed_forward_length"),
        intermediate_size=fields.need("expert_feed_forward_length"),
        num_local_experts=fields.need("expert_count"), num_experts_per_tok=fields.need("expert_used_count"),
    )  # fmt: skip


ARCHITECTURES: Mapping[str, Callable[[Fields], Config]] = {
    "llama": _llama,
    **dict.fromkeys(("exaone", "internlm2"), _plain_llama),
    "mistral3": mistral3,
    "apertus": apertus,
    "arcee": arcee,
    "bloom": bloom,
    "afmoe": afmoe,
    "mimo2": mimo2,
    **dict.fromkeys(("qwen2", "qwen2vl"), _qwen2),
    **dict.fromkeys(("qwen3", "qwen3vl"), _qwen3),
    "qwen2moe": _qwen2moe,
    **dict.fromkeys(("qwen3moe", "qwen3vlmoe"), _qwen3moe),
    "olmoe": lambda fields: named("OlmoeForCausalLM", "olmoe", **_experts(fields), norm_topk_prob=False),
    "llama4": _llama4,
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "gemma3n": gemma3n,
    "gemma4": gemma4,
    "gpt2": _gpt2,
    "gptneox": gpt_neox,
    "falcon": _falcon,
    **dict.fromkeys(("deepseek", "bailingmoe"), deepseek),
    "deepseek2": deepseek2,
    "glm-dsa": glm_dsa,
    "mistral4": mistral4,
    "minicpm3": minicpm3,
    "kimi-linear": kimi_linear,
    "qwen3next": qwen3_next,
    "qwen35": qwen3_5,
    "qwen35moe": qwen3_5_moe,
    "granitehybrid": granite_hybrid,
    "nemotron": nemotron,
    "nemotron_h": nemotron_h,
    "nemotron_h_moe": nemotron_h,
    "phi2": phi2,
    "phi3": _phi3,
    "starcoder": starcoder,
    "starcoder2": _starcoder2,
    "granite": _granite,
    "granitemoe": _granitemoe,
    "gpt-oss": _gpt_oss,
    "lfm2": lfm2,
    "lfm2moe": lfm2_moe,
    "mamba": mamba,
    "mamba2": mamba2,
    "falcon-h1": falcon_h1,
    "jamba": jamba,
    "smollm3": smollm3,
    "seed_oss": seed_oss,
    "exaone4": exaone4,
    "exaone-moe": exaone_moe,
    "stablelm": stablelm,
    "ernie4_5": ernie4_5,
    "hunyuan-dense": hunyuan_dense,
    "hunyuan-moe": hunyuan_moe,
    "minicpm": minicpm,
    "olmo": olmo,
    "olmo2": _olmo2,
    "command-r": _cohere,
    "cohere2": _cohere2,
    "ernie4_5-moe": _ernie4_5_moe,
    "phimoe": _phimoe,
    "minimax-m2": _minimax_m2,
    **dict.fromkeys(("glm4moe", "dots1", "bailingmoe2"), glm4_moe),
    "chatglm": chatglm,
    "glm4": lambda _: named("Glm4ForCausalLM", "glm4", hidden_act="silu"),
}
"""llama.cpp's name of an architecture → the fields of config.json that it adds."""
