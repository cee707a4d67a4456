"""Checkpoints without weights: the shapes of published models, to be loaded with random values."""

import json
from pathlib import Path

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}

SHAPES = {
    "qwen3-0.6b": _QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": _QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "tie_word_embeddings": False,
    },
}


def write_shape(name: str, folder: Path) -> Path:
    """Writes config.json of a shape into a folder of its name; returns that folder."""
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(SHAPES[name], indent=1))
    return path


def decode_bytes(name: str, context_tokens: int) -> int:
    """Counts the bytes that a decode step has to read: all weights but the embedding's other rows, and the cache.

    `context_tokens` is the sum of all sequences' lengths. bfloat16.
    """
    shape = SHAPES[name]
    hidden, heads, kv_heads = shape["hidden_size"], shape["num_attention_heads"], shape["num_key_value_heads"]
    head_dim, layers = shape["head_dim"], shape["num_hidden_layers"]
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    weights = layers * (attention + 3 * hidden * shape["intermediate_size"]) + hidden * shape["vocab_size"]
    return 2 * (weights + 2 * layers * kv_heads * head_dim * context_tokens)
