"""The fields of config.json that a GGUF file's metadata amounts to: sizes, and those of its architecture.

Metadata keys begin with the architecture: `llama.embedding_length`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from quire.core.errors import ConfigError
from quire.frontend.checkpoint.gguf.architectures import ARCHITECTURES
from quire.frontend.checkpoint.gguf.fields import Config, Fields
from quire.frontend.checkpoint.gguf.refusals import REASONS
from quire.frontend.checkpoint.gguf.rotation import make_rope

QUANT_METHOD = "gguf"
"""In `quantization_config`: linear layers are read as the file has them."""


def check_model(fields: Fields) -> None:
    """That the file holds a model that is read here.

    Raises:
        ConfigError: an architecture that is not read, or no weights.
    """
    if not fields.architecture:
        raise ConfigError(f"{fields.path} lacks general.architecture: it holds no model, or is damaged.")
    if fields.architecture not in ARCHITECTURES:
        reason = f": {REASONS[fields.architecture]}" if fields.architecture in REASONS else ""
        raise ConfigError(
            f"{fields.path} holds a model of the architecture {fields.architecture!r}, which is not read{reason}. GGUF "
            f"files are read of {', '.join(sorted(ARCHITECTURES))}. Serve the repository that the file was made from."
        )
    if "token_embd.weight" not in fields.tensors:
        raise ConfigError(f"{fields.path} holds a vocabulary but no weights: name the file of the model itself.")
    if len(shape := fields.tensors["token_embd.weight"].shape) != 2:
        raise ConfigError(f"{fields.path} is damaged: token_embd.weight is of shape {list(shape)}. Download it again.")


def make_config(fields: Fields) -> Config:
    """The fields of config.json.

    Raises:
        ConfigError: metadata that lack a number, or an arrangement that is not read.
    """
    own = ARCHITECTURES[fields.architecture](fields)
    if fields.has_any("nextn.eh_proj.weight"):
        own["num_nextn_predict_layers"] = fields.need("nextn_predict_layers")
    return {**{name: find(fields) for name, find in _COMMON.items() if name not in own}, **own}


def _head_dim(fields: Fields) -> int:
    if fields.get("attention.value_length", fields.head_dim) != fields.head_dim:
        raise ConfigError(f"{fields.path}: values of another size than keys are not supported in GGUF files.")
    return fields.head_dim


def _num_kv_heads(fields: Fields) -> int:
    heads, kv_heads = fields.num_heads, fields.num_kv_heads
    if heads % kv_heads:
        raise ConfigError(
            f"{fields.path} is damaged: {fields.architecture}.attention.head_count ({heads}) is not a multiple of "
            f"attention.head_count_kv ({kv_heads}). Download it again."
        )
    return kv_heads


def _eps(fields: Fields) -> float | None:
    """None: norms are no RMS norms."""
    name = "attention.layer_norm_rms_epsilon"
    return fields.need(name) if fields.get("attention.layer_norm_epsilon") is None else fields.get(name)


def _dtype(fields: Fields) -> str:
    """The type of activations and unquantized weights: the embedding's own, or bfloat16 with quantized weights."""
    plain = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    types = {tensor.type for tensor in fields.tensors.values() if len(tensor.shape) > 1}
    kind = fields.tensors["token_embd.weight"].type
    return plain[kind] if types <= set(plain) else "bfloat16"


_COMMON: Mapping[str, Callable[[Fields], Any]] = {
    "hidden_size": lambda fields: fields.need("embedding_length"),
    "num_hidden_layers": lambda fields: fields.need("block_count"),
    "num_attention_heads": lambda fields: fields.num_heads,
    "num_key_value_heads": _num_kv_heads,
    "head_dim": _head_dim,
    "intermediate_size": lambda fields: fields.need(
        "feed_forward_length" if fields.get("feed_forward_length") else "expert_feed_forward_length"
    ),
    "max_position_embeddings": lambda fields: fields.need("context_length"),
    "vocab_size": lambda fields: fields.tensors["token_embd.weight"].shape[0],
    "rms_norm_eps": _eps,
    "tie_word_embeddings": lambda fields: "output.weight" not in fields.tensors,
    "attention_bias": lambda fields: fields.has_attention_bias,
    "mlp_bias": lambda fields: any(fields.has_any(f"ffn_{part}.bias") for part in ("gate", "up", "down")),
    "dtype": _dtype,
    "rope_parameters": make_rope,
    "quantization_config": lambda _: {"quant_method": QUANT_METHOD},
}
"""The fields that architectures need not say → what they are."""
