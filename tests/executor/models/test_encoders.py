"""Encoders against Transformers: hidden states of each token, labels, scores of the vocabulary, ranks and refusals."""

import contextlib
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.core.errors import ModelLoadError
from quire.executor.memory.dry_build import dry_build, held_bytes
from quire.executor.models.base import Model, StepContext
from quire.executor.models.registry import is_native
from quire.ops.backend import Backend
from tests.executor.models.tiny_encoders import ENCODERS, T5, VOCAB_SIZE, hidden_states, write_encoder
from tests.executor.paged_driver import load_model, model_context, read_spec
from tests.executor.pretend_device import DEVICE
from tests.executor.thread_group import on_every_rank

torch.set_num_threads(1)

LENGTHS = (40, 1, 7, 90, 2)
PROMPTS = [[(37 * place * place + 11 * place + size) % 197 + 3 for place in range(size)] for size in LENGTHS]


@torch.inference_mode()
def encode(
    model: Model, prompts: list[list[int]], ops: Backend, token_types: list[list[int]] | None = None
) -> list[Tensor]:
    """The hidden states of all prompts, computed together."""
    lengths = np.array([len(prompt) for prompt in prompts])
    positions = torch.cat([torch.arange(length) for length in lengths]).to(DEVICE)
    types = None if token_types is None else torch.tensor([*itertools.chain(*token_types)]).to(DEVICE)
    step = StepContext(
        positions, [], [], sequences=ops.sequence_batch(lengths, torch.device(DEVICE)), token_types=types
    )
    return list(
        model.forward(torch.tensor([*itertools.chain(*prompts)]).to(DEVICE), step).cpu().split(lengths.tolist())
    )


def ops_of(model: Any) -> Backend:
    return model._embed._ops


@pytest.mark.parametrize("name", [*ENCODERS, *T5])
def test_hidden_states_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Of prompts together, and in another order the same bits, where our kernels compute."""
    reference = write_encoder(tmp_path, name, "EncoderModel" if name in T5 else "Model")
    spec = read_spec(tmp_path)
    assert spec.is_encoder
    model = load_model(spec)
    assert is_native(model)
    assert not model.kv_layers
    got = encode(model, PROMPTS, ops_of(model))
    for states, prompt in zip(got, PROMPTS, strict=True):
        torch.testing.assert_close(states, hidden_states(reference, prompt), atol=1e-4, rtol=0)
    turned = encode(model, PROMPTS[::-1], ops_of(model))[::-1]
    alone = [encode(model, [prompt], ops_of(model))[0] for prompt in PROMPTS]
    for states, others, own in zip(got, turned, alone, strict=True):
        torch.testing.assert_close(states, others, atol=1e-5, rtol=0)
        torch.testing.assert_close(states, own, atol=1e-5, rtol=0)


HUB: dict[str, dict[str, Any]] = {
    "nomic": {
        "architectures": ["NomicBertModel"], "model_type": "nomic_bert", "n_embd": 48, "n_layer": 3, "n_head": 4,
        "n_inner": 72, "n_positions": 130, "layer_norm_epsilon": 1e-12, "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0, "activation_function": "swiglu", "type_vocab_size": 2, "moe_every_n_layers": 0,
    },
    "gte": {
        "architectures": ["NewModel"], "model_type": "new", "hidden_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "intermediate_size": 72, "max_position_embeddings": 130, "layer_norm_eps": 1e-12,
        "rope_theta": 160000, "rope_scaling": None, "hidden_act": "gelu", "type_vocab_size": 1,
        "position_embedding_type": "rope", "pack_qkv": True,
    },
    "modernbert": {
        "architectures": ["ModernBertForMaskedLM"], "model_type": "modernbert", "hidden_size": 48,
        "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 72, "max_position_embeddings": 130,
        "local_attention": 20, "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0,
        "local_rope_theta": 10000.0, "hidden_activation": "gelu", "norm_eps": 1e-05, "tie_word_embeddings": True,
    },
}  # fmt: skip
"""config.json as the hub's checkpoints have it, in the words of their own code or of older libraries."""


@pytest.mark.parametrize("name", HUB)
def test_configurations_of_the_hub(name: str, tmp_path: Path) -> None:
    reference = write_encoder(tmp_path, name, "ForMaskedLM" if name == "modernbert" else "Model")
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE, **HUB[name]}))
    model = load_model(read_spec(tmp_path))
    for states, prompt in zip(encode(model, PROMPTS, ops_of(model)), PROMPTS, strict=True):
        torch.testing.assert_close(states, hidden_states(reference, prompt), atol=1e-4, rtol=0)


TYPED = ["bert", "electra", "albert", "nomic", "deberta-v2"]


@pytest.mark.parametrize("name", TYPED)
def test_segments_are_embedded(name: str, tmp_path: Path) -> None:
    reference = write_encoder(tmp_path, name)
    model = load_model(read_spec(tmp_path))
    types = [[int(place > len(prompt) // 3) for place in range(len(prompt))] for prompt in PROMPTS]
    got = encode(model, PROMPTS, ops_of(model), types)
    for states, prompt, own in zip(got, PROMPTS, types, strict=True):
        torch.testing.assert_close(states, hidden_states(reference, prompt, own), atol=1e-4, rtol=0)
    plain = encode(model, PROMPTS, ops_of(model))
    zeros = encode(model, PROMPTS, ops_of(model), [[0] * len(prompt) for prompt in PROMPTS])
    assert all(torch.equal(one, other) for one, other in zip(plain, zeros, strict=True))
    assert not torch.equal(got[0], plain[0])


CLS_LABELS = [
    *("bert", "roberta", "electra", "albert", "distilbert", "mpnet", "modernbert", "modernbert-biases"),
    *("gte", "nomic", "jina-v3", "deberta-v3"),
]


@pytest.mark.parametrize("name", [*CLS_LABELS, "eurobert", "eurobert-late"])
def test_labels_of_a_sequence(name: str, tmp_path: Path) -> None:
    """The head behind the first token's state, or the mean."""
    reference = write_encoder(tmp_path, name, "ForSequenceClassification", num_labels=3)
    model: Any = load_model(read_spec(tmp_path))
    states = encode(model, PROMPTS, ops_of(model))
    pooled = torch.stack([each.mean(0) if name.startswith("eurobert") else each[0] for each in states]).float()
    with torch.inference_mode():
        got = model.classify(pooled.to(DEVICE)).cpu()
        for logits, prompt in zip(got, PROMPTS, strict=True):
            expected = reference(input_ids=torch.tensor([prompt])).logits[0]
            torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "name", ["bert", "roberta", "electra", "albert", "distilbert", "mpnet", "modernbert", "gte", "deberta-v3"]
)
def test_labels_of_tokens(name: str, tmp_path: Path) -> None:
    reference = write_encoder(tmp_path, name, "ForTokenClassification", num_labels=5)
    model: Any = load_model(read_spec(tmp_path))
    [states] = encode(model, PROMPTS[:1], ops_of(model))
    with torch.inference_mode():
        expected = reference(input_ids=torch.tensor(PROMPTS[:1])).logits[0]
        torch.testing.assert_close(model.classify(states.float().to(DEVICE)).cpu(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "name", ["bert", "roberta", "electra", "albert", "distilbert", "mpnet", "modernbert", "gte", "nomic", "jina-v3"]
)
def test_scores_of_the_vocabulary(name: str, tmp_path: Path) -> None:
    reference = write_encoder(tmp_path, name, "ForMaskedLM")
    model = load_model(read_spec(tmp_path))
    [states] = encode(model, PROMPTS[:1], ops_of(model))
    with torch.inference_mode():
        expected = reference(input_ids=torch.tensor(PROMPTS[:1])).logits[0]
        got = model.compute_logits(states.to(DEVICE)).cpu()
    assert got.shape == (len(PROMPTS[0]), VOCAB_SIZE)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["bert", "mpnet", "albert", "modernbert", "eurobert", "deberta-v3", "t5"])
def test_ranks_compute_the_same(name: str, tmp_path: Path) -> None:
    write_encoder(tmp_path, name, "EncoderModel" if name in T5 else "Model")
    spec = read_spec(tmp_path)
    model = load_model(spec)
    expected = encode(model, PROMPTS, ops_of(model))

    def run(group: Any) -> list[Tensor]:
        rank = load_model(spec, group=group)
        return encode(rank, PROMPTS, ops_of(rank))

    for got in on_every_rank(2, run):
        for states, own in zip(got, expected, strict=True):
            torch.testing.assert_close(states, own, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["bert", "albert", "modernbert", "deberta-v3", "t5"])
def test_a_dry_build_counts_the_bytes(name: str, tmp_path: Path) -> None:
    write_encoder(tmp_path, name, "EncoderModel" if name in T5 else "Model")
    spec = read_spec(tmp_path)
    context = model_context(spec)
    with contextlib.closing(context.weights), torch.inference_mode():
        dry = dry_build(spec, context)
    assert held_bytes(dry) == held_bytes(load_model(spec))


@pytest.mark.parametrize("name", ["bert", "modernbert", "deberta-v3"])
@pytest.mark.parametrize(("dtype", "quantization"), [("bfloat16", None), ("float16", None), ("bfloat16", "int8")])
def test_fewer_bits_stay_near(name: str, dtype: str, quantization: Any, tmp_path: Path) -> None:
    reference = write_encoder(tmp_path, name)
    model = load_model(read_spec(tmp_path, dtype=dtype), quantization=quantization)
    for states, prompt in zip(encode(model, PROMPTS, ops_of(model)), PROMPTS, strict=True):
        expected = hidden_states(reference, prompt)
        assert torch.cosine_similarity(states.float(), expected, dim=-1).min() > 0.99


def test_names_of_norms_in_the_first_release(tmp_path: Path) -> None:
    """bert-base-uncased on the hub says gamma and beta."""
    from safetensors.torch import load_file, save_file

    reference = write_encoder(tmp_path, "bert", "ForMaskedLM")
    tensors = load_file(tmp_path / "model.safetensors")
    legacy = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    renamed = {}
    for name, tensor in tensors.items():
        for end, other in legacy.items():
            name = name.replace(end, other)
        renamed[name] = tensor
    save_file(renamed, tmp_path / "model.safetensors")
    model = load_model(read_spec(tmp_path))
    [states] = encode(model, PROMPTS[:1], ops_of(model))
    torch.testing.assert_close(states, hidden_states(reference, PROMPTS[0]), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key'"),
        ("nomic", {"moe_every_n_layers": 2}, "lacks 'num_experts'"),
        ("deberta-v2", {"conv_act": "mish"}, "conv_act 'mish'"),
        ("deberta-v2", {"pos_att_type": ["p2p"]}, "pos_att_type may name c2p and p2c, got p2p"),
    ],
)
def test_settings_without_support_are_refused(
    name: str, overrides: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_encoder(tmp_path, name)
    with pytest.raises(ModelLoadError, match=message):
        load_model(read_spec(tmp_path, **overrides))


def test_lengths_beyond_the_learned_positions_are_refused(tmp_path: Path) -> None:
    write_encoder(tmp_path, "roberta")
    config = json.loads((tmp_path / "config.json").read_bytes())
    spec = read_spec(tmp_path)
    assert spec.max_position_embeddings == config["max_position_embeddings"] - 2  # positions begin behind padding
    context = model_context(spec)
    import dataclasses

    from quire.executor.models.registry import build_model

    with contextlib.closing(context.weights), pytest.raises(ModelLoadError, match="128 learned positions"):
        build_model(spec, dataclasses.replace(context, max_model_len=129))


def jina_states(tensors: dict[str, Tensor], config: dict[str, Any], token_ids: list[int]) -> Tensor:
    """Jina's embeddings v2 by their paper: BERT without positions, biases of -|distance| * slope, and GeGLU."""
    import torch.nn.functional as F

    heads, inner, eps = config["num_attention_heads"], config["intermediate_size"], config["layer_norm_eps"]

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], tensors[f"{name}.weight"], tensors[f"{name}.bias"], eps)

    slopes = torch.tensor([2.0 ** (-8 * (head + 1) / heads) for head in range(heads)])
    places = torch.arange(len(token_ids))
    bias = -slopes.view(-1, 1, 1) * (places.unsqueeze(0) - places.unsqueeze(1)).abs()
    x = tensors["embeddings.word_embeddings.weight"][token_ids] + tensors["embeddings.token_type_embeddings.weight"][0]
    x = norm("embeddings.LayerNorm", x)
    for index in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{index}"
        q, k, v = (
            linear(f"{layer}.attention.self.{name}", x).unflatten(1, (heads, -1)).transpose(0, 1)
            for name in ("query", "key", "value")
        )
        attended = F.scaled_dot_product_attention(q, k, v, bias).transpose(0, 1).flatten(1)
        x = norm(f"{layer}.attention.output.LayerNorm", linear(f"{layer}.attention.output.dense", attended) + x)
        both = linear(f"{layer}.mlp.gated_layers", x)
        mixed = linear(f"{layer}.mlp.wo", F.gelu(both[:, :inner]) * both[:, inner:])
        x = norm(f"{layer}.mlp.layernorm", mixed + x)
    return x


def test_jina_v2_is_as_its_paper_says(tmp_path: Path) -> None:
    """Its class is code of the checkpoint's own, which Transformers does not have."""
    from safetensors.torch import save_file

    size, inner = 48, 72
    config = {
        "architectures": ["JinaBertModel"], "model_type": "bert", "position_embedding_type": "alibi",
        "feed_forward_type": "geglu", "hidden_size": size, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": inner, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 200, "type_vocab_size": 2,
        "layer_norm_eps": 1e-12, "hidden_act": "gelu",
    }  # fmt: skip
    shapes = {
        "embeddings.word_embeddings": (VOCAB_SIZE, size), "embeddings.token_type_embeddings": (2, size),
        "embeddings.LayerNorm": (size,),
    }  # fmt: skip
    for index in range(2):
        layer = f"encoder.layer.{index}"
        shapes |= {f"{layer}.attention.self.{name}": (size, size) for name in ("query", "key", "value")}
        shapes |= {
            f"{layer}.attention.output.dense": (size, size), f"{layer}.attention.output.LayerNorm": (size,),
            f"{layer}.mlp.gated_layers": (2 * inner, size), f"{layer}.mlp.wo": (size, inner),
            f"{layer}.mlp.layernorm": (size,),
        }  # fmt: skip
    tensors = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            tensors[f"{name}.weight"] = 1 + 0.1 * torch.randn(shape)
        else:
            tensors[f"{name}.weight"] = torch.randn(shape) * shape[1] ** -0.5
        if ("embeddings." not in name[:11] and "gated" not in name) or "LayerNorm" in name:
            tensors[f"{name}.bias"] = 0.1 * torch.randn(shape[0])
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_model(read_spec(tmp_path))
    for states, prompt in zip(encode(model, PROMPTS, ops_of(model)), PROMPTS, strict=True):
        torch.testing.assert_close(states, jina_states(tensors, config, prompt), atol=1e-4, rtol=0)
