"""Decoders whose classes are code of the hub's own: their checkpoints, made of Llama's and of formulas."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from quire.executor.memory.dry_build import dry_build, held_bytes
from tests.executor.models.test_encoders import PROMPTS, encode
from tests.executor.paged_driver import load_model, model_context, read_spec
from tests.executor.step.heads.test_vector_heads import PROMPTS as TEXTS
from tests.executor.step.heads.test_vector_heads import computed

torch.set_num_threads(1)

HEADS, KV_HEADS, SIZE = 4, 2, 64


def llama(folder: Path, **settings: Any) -> tuple[Any, dict[str, Tensor], dict[str, Any]]:
    """(the library's model of a tiny Llama, its stored tensors, its config.json)."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=SIZE, num_hidden_layers=2, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=16,
        intermediate_size=96, vocab_size=512, max_position_embeddings=128, **settings,
    )  # fmt: skip
    model = transformers.LlamaModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder)
    return model.eval(), load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_bytes())


INTERNLM = {
    "self_attn.o_proj": "attention.wo", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2",
}  # fmt: skip


def test_internlm2_rewards_tokens(tmp_path: Path) -> None:
    """Queries, keys and values of a KV head are neighbours in one tensor; `v_head` makes a reward of each token."""
    reference, tensors, config = llama(tmp_path)
    stored = {
        "model.tok_embeddings.weight": tensors["embed_tokens.weight"], "model.norm.weight": tensors["norm.weight"],
        "v_head.weight": torch.randn(1, SIZE),
    }  # fmt: skip
    for index in range(2):
        layer = f"layers.{index}"
        q, k, v = (tensors[f"{layer}.self_attn.{name}_proj.weight"] for name in "qkv")
        parts = [part.unflatten(0, (KV_HEADS, -1)) for part in (q, k, v)]
        stored[f"model.{layer}.attention.wqkv.weight"] = torch.cat(parts, dim=1).flatten(0, 1).contiguous()
        for name, other in INTERNLM.items():
            stored[f"model.{layer}.{other}.weight"] = tensors[f"{layer}.{name}.weight"]
    save_file(stored, tmp_path / "model.safetensors")
    own = {"architectures": ["InternLM2ForRewardModel"], "model_type": "internlm2", "bias": False}
    (tmp_path / "config.json").write_text(json.dumps({**config, **own}))
    spec = read_spec(tmp_path, architectures=["InternLM2ForCausalLM"], tie_word_embeddings=True)
    assert held_bytes(dry_build(spec, model_context(spec))) == held_bytes(load_model(spec))
    with torch.inference_mode():
        expected = [
            reference(torch.tensor([prompt])).last_hidden_state[0] @ stored["v_head.weight"].T for prompt in TEXTS
        ]  # fmt: skip
    for got, rewards in zip(computed(tmp_path, dtype="float32"), expected, strict=True):
        torch.testing.assert_close(torch.tensor(got), rewards, atol=1e-4, rtol=0)


class _Latents(nn.Module):
    """NV-Embed's attention to latents, as its paper (section 3.1) and its checkpoints' names have it."""

    def __init__(self, heads: int, head_dim: int, count: int) -> None:
        super().__init__()
        inner = heads * head_dim
        self.heads = heads
        self.latents = nn.Parameter(torch.randn(count, SIZE))
        attention = nn.Module()
        attention.fn = nn.Module()
        attention.fn.to_q = nn.Linear(SIZE, inner, bias=False)
        attention.fn.to_kv = nn.Linear(SIZE, 2 * inner, bias=False)
        attention.fn.to_out = nn.Linear(inner, SIZE, bias=False)
        attention.norm, attention.norm_context = nn.LayerNorm(SIZE), nn.LayerNorm(SIZE)
        mlp = nn.Module()
        mlp.norm, mlp.fn = nn.LayerNorm(SIZE), nn.Module()
        mlp.fn.net = nn.ModuleList([nn.Linear(SIZE, 8 * SIZE), nn.Identity(), nn.Linear(4 * SIZE, SIZE)])
        self.cross_attend_blocks = nn.ModuleList([attention, mlp])

    def forward(self, x: Tensor) -> Tensor:
        attention, mlp = self.cross_attend_blocks
        q = attention.fn.to_q(attention.norm(x))
        k, v = attention.fn.to_kv(attention.norm_context(self.latents)).chunk(2, dim=-1)
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(0, 1) for each in (q, k, v))
        x = x + attention.fn.to_out(F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1))
        up, gates = mlp.fn.net[0](mlp.norm(x)).chunk(2, dim=-1)
        return x + mlp.fn.net[2](up * F.gelu(gates))


@pytest.mark.parametrize("dry", [False, True])
def test_nv_embed_attends_to_latents(dry: bool, tmp_path: Path) -> None:
    reference, tensors, config = llama(tmp_path)
    torch.manual_seed(1)
    latents = _Latents(heads=2, head_dim=32, count=12).eval()
    stored = {f"embedding_model.{name}": tensor for name, tensor in tensors.items()}
    stored |= {f"latent_attention_model.{name}": tensor for name, tensor in latents.state_dict().items()}
    save_file(stored, tmp_path / "model.safetensors")
    own = {
        "architectures": ["NVEmbedModel"], "model_type": "nvembed",
        "text_config": {**config, "architectures": ["MistralModel"], "model_type": "mistral"},
        "latent_attention_config": {
            "model_type": "latent_attention", "num_latents_value": 12, "num_cross_heads": 2, "cross_dim_head": 32,
            "latent_dim": SIZE, "output_normalize": True,
        },
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(own))
    spec = read_spec(tmp_path)
    assert spec.is_encoder
    if dry:
        assert held_bytes(dry_build(spec, model_context(spec))) == held_bytes(load_model(spec))
        return
    model: Any = load_model(spec)
    with torch.inference_mode():
        for states, prompt in zip(encode(model, PROMPTS, model_context(spec).ops), PROMPTS, strict=True):
            mask = torch.zeros(1, 1, len(prompt), len(prompt))
            hidden = reference(torch.tensor([prompt]), attention_mask=mask).last_hidden_state[0]
            torch.testing.assert_close(states, latents(hidden), atol=1e-4, rtol=0)
