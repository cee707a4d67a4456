"""Weights that are made to copy: each token's successor is another token, in cycles, and layers add nothing."""

from typing import Any

CYCLE = 251
"""The first tokens follow each other in a cycle of so many; each other token follows itself."""


def copying_weights(shape: dict[str, Any]) -> dict[str, Any]:
    """Returns bfloat16 tensors, by their names in a checkpoint."""
    import torch

    torch.manual_seed(0)
    hidden, inner, size = shape["hidden_size"], shape["intermediate_size"], shape["vocab_size"]
    heads, groups, dim = shape["num_attention_heads"], shape["num_key_value_heads"], shape["head_dim"]
    embedding = torch.randn(size, hidden, dtype=torch.bfloat16)
    before = torch.arange(size)
    before[:CYCLE] = torch.arange(CYCLE).roll(1)  # whose successor a token is
    tensors = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": embedding[before].contiguous(),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
    }
    sizes = {
        "self_attn.q_proj": (heads * dim, hidden),
        "self_attn.k_proj": (groups * dim, hidden),
        "self_attn.v_proj": (groups * dim, hidden),
        "self_attn.o_proj": (hidden, heads * dim),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden, "self_attn.q_norm": dim}
    for layer in range(shape["num_hidden_layers"]):
        for name, rows in sizes.items():
            adds = name.endswith(("o_proj", "down_proj"))
            weight = torch.zeros(rows) if adds else torch.randn(rows) / hidden**0.5
            tensors[f"model.layers.{layer}.{name}.weight"] = weight.bfloat16()
        for name, length in (norms | {"self_attn.k_norm": dim}).items():
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.ones(length, dtype=torch.bfloat16)
    return tensors


def copying_prompts(number: int) -> list[list[int]]:
    """Returns prompts of 256 tokens of the cycle."""
    return [[(index + 7 * row) % CYCLE for index in range(256)] for row in range(number)]


def copied(prompt: list[int], num_tokens: int) -> list[int]:
    """Returns the answer to a prompt."""
    return [(prompt[-1] + place) % CYCLE for place in range(1, num_tokens + 1)]
