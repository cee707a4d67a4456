"""Reads params.json, the configuration in Mistral's own releases, as the config.json that it amounts to."""

from pathlib import Path
from typing import Any

from quire.core.errors import ConfigError

FILE_NAME = "params.json"

_FIELDS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "vocab_size": "vocab_size",
    "rope_theta": "rope_theta",
    "tied_embeddings": "tie_word_embeddings",
    "dtype": "dtype",
}
_YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta": "beta_fast",
    "alpha": "beta_slow",
}
_NOT_DENSE = (
    *("moe", "quantization", "multimodal", "vision_encoder", "llama_4_scaling"),
    *("q_lora_rank", "qk_nope_head_dim", "ssm_cfg"),
)
_DEFAULT_CONTEXT = 128_000
_EOS = 2
"""The end of an output in all of Mistral's vocabularies."""


def as_hub_config(params: dict[str, Any], path: Path) -> dict[str, Any]:
    """The fields of config.json that say what `params`, the content of params.json, says.

    Raises:
        ConfigError: a model that is no dense decoder of text; its repository has a config.json as well.
    """
    others = [name for name in _NOT_DENSE if params.get(name)]
    if others:
        raise ConfigError(
            f"{path} describes more than a dense decoder ({', '.join(others)}), which is read from config.json alone: "
            "serve the repository's files in the form of the Hugging Face hub, without --config-format mistral."
        )
    config = {ours: params[name] for name, ours in _FIELDS.items() if params.get(name) is not None}
    length = params.get("max_position_embeddings") or params.get("max_seq_len") or _DEFAULT_CONTEXT
    return {
        "model_type": "mistral",
        "hidden_act": params.get("activation", "silu"),
        "max_position_embeddings": length,
        "eos_token_id": _EOS,
        **config,
        **_windows(params, path),
        **_rotary(params),
    }


def _windows(params: dict[str, Any], path: Path) -> dict[str, Any]:
    """Reads `sliding_window`: a size for all layers, or a list of sizes and nulls that repeats over the layers."""
    window = params.get("sliding_window")
    if not isinstance(window, list):
        return {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    sizes = {size for size in window if size is not None}
    repeats, rest = divmod(params.get("n_layers", 0), len(window) or 1)
    if len(sizes) > 1 or rest:
        raise ConfigError(f"{path}: sliding_window must repeat one size and null over the layers, got {window}.")
    if None not in window or not sizes:
        return {"architectures": ["MistralForCausalLM"], "sliding_window": max(sizes, default=None)}
    types = ["full_attention" if size is None else "sliding_attention" for size in window] * repeats
    return {
        "architectures": ["MinistralForCausalLM"],
        "model_type": "ministral",
        "sliding_window": max(sizes),
        "layer_types": types,
    }


def _rotary(params: dict[str, Any]) -> dict[str, Any]:
    yarn = params.get("yarn")
    if not yarn:
        return {}
    rope = {ours: yarn[name] for name, ours in _YARN.items() if name in yarn}
    rope |= {"rope_type": "yarn", "mscale_all_dim": 1, "rope_theta": params.get("rope_theta", 10_000.0)}
    if yarn.get("apply_scale") is False:
        rope["attention_factor"] = 1.0
    return {"rope_parameters": rope}
