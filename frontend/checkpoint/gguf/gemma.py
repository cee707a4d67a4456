"""The fields of config.json that the architectures of Gemma add to those of all."""

import struct
from statistics import NormalDist

from quire.frontend.checkpoint.gguf.fields import Config, Fields, named
from quire.frontend.checkpoint.gguf.rotation import make_scaling


def gemma(fields: Fields) -> Config:
    return named("GemmaForCausalLM", "gemma", hidden_activation="gelu_pytorch_tanh")


def gemma2(fields: Fields) -> Config:
    return named(
        "Gemma2ForCausalLM", "gemma2", hidden_activation="gelu_pytorch_tanh",
        sliding_window=fields.get("attention.sliding_window", 4096),
        attn_logit_softcapping=fields.get("attn_logit_softcapping", 50.0),
        final_logit_softcapping=fields.get("final_logit_softcapping", 30.0),
        query_pre_attn_scalar=_query_scalar(fields, largest=46),
    )  # fmt: skip


def gemma3(fields: Fields) -> Config:
    return named(
        "Gemma3ForCausalLM", "gemma3_text", **_windows(fields, interval=6, size=None),
        query_pre_attn_scalar=_query_scalar(fields, largest=62),
    )  # fmt: skip


def gemma3n(fields: Fields) -> Config:
    scales = fields.get("activation_sparsity_scale")
    return named(
        "Gemma3nForCausalLM", "gemma3n_text", **_windows(fields, interval=5, size=512),
        **_per_layer_inputs(fields),
        altup_num_inputs=fields.get("altup.num_inputs", 4), altup_active_idx=fields.get("altup.active_idx", 0),
        laurel_rank=fields.rows("laurel_l.weight"),
        activation_sparsity_pattern=scales and [NormalDist().cdf(scale) for scale in scales],
    )  # fmt: skip


def gemma4(fields: Fields) -> Config:
    """Layers that see all tokens have wider heads, and sometimes fewer of keys, whose values may be their keys."""
    own = _windows(fields, interval=6, size=512)
    is_full = [kind == "full_attention" for kind in own["layer_types"]]
    kv_heads = fields.by_layer("attention.head_count_kv")
    own["rope_parameters"]["full_attention"] |= _proportional(fields)
    if fields.get("expert_count"):
        own |= {
            "enable_moe_block": True, "num_experts": fields.need("expert_count"),
            "top_k_experts": fields.need("expert_used_count"),
            "moe_intermediate_size": fields.need("expert_feed_forward_length"),
        }  # fmt: skip
    sizes = fields.by_layer("feed_forward_length")
    return named(
        "Gemma4ForCausalLM", "gemma4_text", **own, **_per_layer_inputs(fields),
        head_dim=fields.need("attention.key_length_swa"), global_head_dim=fields.need("attention.key_length"),
        num_key_value_heads=kv_heads[is_full.index(False)], num_global_key_value_heads=kv_heads[is_full.index(True)],
        attention_k_eq_v=not fields.has(is_full.index(True), "attn_v.weight"),
        intermediate_size=sizes[0], use_double_wide_mlp=sizes[-1] == 2 * sizes[0],
    )  # fmt: skip


def _windows(fields: Fields, interval: int, size: int | None) -> Config:
    """Windows of `size` tokens, if the file does not say another number, and rotations of both kinds of layers.

    Every layer of an `interval` sees all tokens, if the file has no list; without a size, all layers do.
    """
    window = fields.get("attention.sliding_window", size)
    scaling = make_scaling(fields, fields.head_dim, has_factors=False)  # Gemma 4's factors: see `_proportional`
    full = {"rope_theta": fields.get("rope.freq_base", 1_000_000.0), **scaling}
    local = {"rope_type": "default", "rope_theta": fields.get("rope.freq_base_swa", 10_000.0)}
    pattern = fields.get("attention.sliding_window_pattern", interval) if window else 1
    count = fields.need("block_count")
    has_window = pattern if isinstance(pattern, list) else [bool((index + 1) % pattern) for index in range(count)]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": window,
        "layer_types": ["sliding_attention" if each else "full_attention" for each in has_window],
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
        "final_logit_softcapping": fields.get("final_logit_softcapping"),
    }


def _per_layer_inputs(fields: Fields) -> Config:
    """The sizes of per-layer embeddings, and the number of last layers that share earlier layers' keys and values."""
    table = fields.tensors.get("per_layer_token_embd.weight")
    return {
        "hidden_size_per_layer_input": fields.get("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": 0 if table is None else table.shape[0],
        "num_kv_shared_layers": fields.get("attention.shared_kv_layers", 0),
    }


def _proportional(fields: Fields) -> Config:
    """The rotation of only some frequencies: those whose factor is 1; others have a factor that stops them."""
    data = fields.rope_factors.get("rope_freqs.weight")
    if data is None:
        return {}
    factors = struct.unpack(f"<{len(data) // 4}f", data)
    return {"rope_type": "proportional", "partial_rotary_factor": factors.count(1.0) / len(factors)}


def _query_scalar(fields: Fields, largest: int) -> float:
    """Only the largest model of a generation, which is known by its number of layers, divides by another number than
    the size of a head."""
    if fields.need("block_count") == largest:
        return fields.need("embedding_length") / fields.num_heads
    return fields.head_dim
