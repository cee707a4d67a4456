"""Encoders whose classes are code of the hub's own, against the formulas of their papers."""

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.core.errors import ModelLoadError
from quire.executor.layers.adapters import AdapterLimits, Adapters
from quire.executor.models.base import HasTaskAdapters
from quire.executor.models.registry import build_model, is_native
from tests.executor.models.test_encoders import PROMPTS, encode, ops_of
from tests.executor.models.tiny_encoders import (
    RANK,
    TASKS,
    VOCAB_SIZE,
    hidden_states,
    merged_jina,
    write_encoder,
    write_jina,
)
from tests.executor.paged_driver import DEVICE, load_model, model_context, read_spec
from tests.executor.thread_group import on_every_rank

torch.set_num_threads(1)

SIZE, INNER, HEADS, EXPERTS = 48, 72, 4, 4
NOMIC = {
    "architectures": ["NomicBertModel"], "model_type": "nomic_bert", "n_embd": SIZE, "n_layer": 4, "n_head": HEADS,
    "n_inner": INNER, "n_positions": 130, "vocab_size": VOCAB_SIZE, "layer_norm_epsilon": 1e-5,
    "rotary_emb_base": 10000.0, "rotary_emb_fraction": 1.0, "activation_function": "gelu", "type_vocab_size": 1,
    "qkv_proj_bias": True, "mlp_fc1_bias": True, "mlp_fc2_bias": True, "moe_every_n_layers": 2, "num_experts": EXPERTS,
    "moe_top_k": 2, "moe_normalize_expert_weights": False,
}  # fmt: skip
"""config.json of nomic-embed-text-v2-moe, with small sizes."""


def nomic_tensors() -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (VOCAB_SIZE, SIZE), "embeddings.token_type_embeddings.weight": (1, SIZE),
    }  # fmt: skip
    norms = ["emb_ln"]
    for index in range(4):
        layer = f"encoder.layers.{index}"
        norms += [f"{layer}.norm1", f"{layer}.norm2"]
        shapes |= {f"{layer}.attn.Wqkv.weight": (3 * SIZE, SIZE), f"{layer}.attn.Wqkv.bias": (3 * SIZE,)}
        shapes |= {f"{layer}.attn.out_proj.weight": (SIZE, SIZE), f"{layer}.attn.out_proj.bias": (SIZE,)}
        if index % 2:
            shapes |= {
                f"{layer}.mlp.router.layer.weight": (EXPERTS, SIZE), f"{layer}.mlp.experts.bias": (SIZE,),
                f"{layer}.mlp.experts.mlp.w1": (EXPERTS * INNER, SIZE),
                f"{layer}.mlp.experts.mlp.w2": (EXPERTS * INNER, SIZE),
            }  # fmt: skip
        else:
            shapes |= {f"{layer}.mlp.fc1.weight": (INNER, SIZE), f"{layer}.mlp.fc1.bias": (INNER,)}
            shapes |= {f"{layer}.mlp.fc2.weight": (SIZE, INNER), f"{layer}.mlp.fc2.bias": (SIZE,)}
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape) * shape[-1] ** -0.5 for name, shape in shapes.items()}
    for name in norms:
        tensors |= {f"{name}.weight": 1 + 0.1 * torch.randn(SIZE), f"{name}.bias": 0.1 * torch.randn(SIZE)}
    return tensors


def nomic_states(tensors: dict[str, Tensor], token_ids: list[int]) -> Tensor:
    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, (SIZE,), tensors[f"{name}.weight"], tensors[f"{name}.bias"], 1e-5)

    def rotated(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        angles = torch.arange(len(token_ids)).unsqueeze(1) * 10000.0 ** (-torch.arange(half) / half)
        first, second = x[..., :half], x[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def experts(name: str, x: Tensor) -> Tensor:
        weights, chosen = linear(f"{name}.router.layer", x).softmax(-1).topk(2)
        up, down = (tensors[f"{name}.experts.mlp.{each}"].view(EXPERTS, INNER, SIZE) for each in ("w1", "w2"))
        rows = []
        for token, (shares, numbers) in enumerate(zip(weights, chosen, strict=True)):
            terms = [
                share * (F.gelu(x[token] @ up[number].T) @ down[number])
                for share, number in zip(shares, numbers.tolist(), strict=True)
            ]
            rows.append(torch.stack(terms).sum(0))
        return torch.stack(rows) + tensors[f"{name}.experts.bias"]

    x = tensors["embeddings.word_embeddings.weight"][token_ids] + tensors["embeddings.token_type_embeddings.weight"][0]
    x = norm("emb_ln", x)
    for index in range(4):
        layer = f"encoder.layers.{index}"
        q, k, v = (
            part.unflatten(1, (HEADS, -1)).transpose(0, 1) for part in linear(f"{layer}.attn.Wqkv", x).chunk(3, dim=1)
        )
        attended = F.scaled_dot_product_attention(rotated(q), rotated(k), v).transpose(0, 1).flatten(1)
        x = norm(f"{layer}.norm1", linear(f"{layer}.attn.out_proj", attended) + x)
        name = f"{layer}.mlp"
        mixed = experts(name, x) if index % 2 else linear(f"{name}.fc2", F.gelu(linear(f"{name}.fc1", x)))
        x = norm(f"{layer}.norm2", mixed + x)
    return x


@pytest.fixture
def nomic(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(NOMIC))
    save_file(nomic_tensors(), tmp_path / "model.safetensors")
    return tmp_path


def test_nomic_with_experts(nomic: Path) -> None:
    tensors, model = nomic_tensors(), load_model(read_spec(nomic))
    for states, prompt in zip(encode(model, PROMPTS, ops_of(model)), PROMPTS, strict=True):
        torch.testing.assert_close(states, nomic_states(tensors, prompt), atol=1e-4, rtol=0)


def test_ranks_share_the_experts_of_nomic(nomic: Path) -> None:
    def run(group: Any) -> list[Tensor]:
        model = load_model(read_spec(nomic), group=group)
        return encode(model, PROMPTS[:1], ops_of(model))

    for [states] in on_every_rank(2, run):
        torch.testing.assert_close(states, nomic_states(nomic_tensors(), PROMPTS[0]), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "overrides", [{"activation_function": "geglu"}, {"mlp_fc1_bias": False}, {"activation_function": "swiglu"}]
)
def test_other_settings_of_nomic_are_refused(nomic: Path, overrides: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError):
        load_model(read_spec(nomic, **overrides))


@pytest.fixture
def jina(tmp_path: Path) -> Path:
    write_jina(tmp_path)
    return tmp_path


@pytest.mark.parametrize("task", [None, *TASKS, "none"])
def test_adapters_of_jina_v3(jina: Path, task: str | None) -> None:
    reference = merged_jina(jina, task or "text-matching")
    model = load_model(read_spec(jina, **({} if task is None else {"jina_task": task})))
    for states, prompt in zip(encode(model, PROMPTS, ops_of(model)), PROMPTS, strict=True):
        torch.testing.assert_close(states, hidden_states(reference, prompt), atol=1e-4, rtol=0)


def test_ranks_have_their_parts_of_an_adapter(jina: Path) -> None:
    model = load_model(read_spec(jina))
    [expected] = encode(model, PROMPTS[:1], ops_of(model))

    def run(group: Any) -> list[Tensor]:
        model = load_model(read_spec(jina), group=group)
        return encode(model, PROMPTS[:1], ops_of(model))

    for [states] in on_every_rank(2, run):
        torch.testing.assert_close(states, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_tokens_have_adapters_of_their_own_tasks(jina: Path, num_ranks: int) -> None:
    """In one step: each prompt has another task, and the first one that of the loaded weights."""
    slots = [None, *(task for task in (*TASKS, "none") if task != "text-matching")]
    prompts = [PROMPTS[0][: 20 + index] for index in range(len(slots))]

    def run(group: Any) -> list[Tensor]:
        spec = read_spec(jina)
        context = model_context(spec, group=group)
        place = Adapters(AdapterLimits(len(slots), 2 * RANK), context.ops, context.dtype, context.device)
        with contextlib.closing(context.weights), torch.inference_mode():
            model = build_model(spec, dataclasses.replace(context, adapters=place))
            assert isinstance(model, HasTaskAdapters)
            for slot, task in enumerate(slots):
                if task is not None:
                    place.load(slot, model.task_adapter(task))
        tokens = [slot if task else -1 for slot, task in enumerate(slots) for _ in prompts[slot]]
        place.enter_step(torch.tensor(tokens).to(DEVICE))
        return encode(model, prompts, ops_of(model))

    expected = [
        hidden_states(merged_jina(jina, task or "text-matching"), prompt)
        for task, prompt in zip(slots, prompts, strict=True)
    ]
    for got in on_every_rank(num_ranks, run):
        for states, own in zip(got, expected, strict=True):
            torch.testing.assert_close(states, own, atol=1e-4, rtol=0)


def test_a_task_without_an_adapter_is_refused(jina: Path) -> None:
    with pytest.raises(ModelLoadError, match="jina_task 'ranking' is none of the checkpoint's tasks, which are retri"):
        load_model(read_spec(jina, jina_task="ranking"))


@pytest.mark.parametrize("head", ["ForSequenceClassification", "Model"])
def test_xlm_roberta_in_the_names_of_flash_attention(tmp_path: Path, head: str) -> None:
    """As Jina Reranker v2 is stored: queries, keys and values are one layer."""
    reference = write_encoder(tmp_path, "xlm-roberta", head, **({} if head == "Model" else {"num_labels": 1}))
    names = {
        "embeddings.LayerNorm.": "emb_ln.", "encoder.layer.": "encoder.layers.",
        "attention.output.dense.": "mixer.out_proj.", "attention.output.LayerNorm.": "norm1.",
        "intermediate.dense.": "mlp.fc1.", ".output.dense.": ".mlp.fc2.", ".output.LayerNorm.": ".norm2.",
    }  # fmt: skip
    stored: dict[str, Tensor] = {}
    tensors = load_file(tmp_path / "model.safetensors")
    for name, tensor in tensors.items():
        if ".attention.self." in name:
            layer, _, part = name.partition(".attention.self.")
            kind = part.partition(".")[2]
            parts = [tensors[f"{layer}.attention.self.{each}.{kind}"] for each in ("query", "key", "value")]
            stored[f"{layer.replace('encoder.layer.', 'encoder.layers.')}.mixer.Wqkv.{kind}"] = torch.cat(parts)
            continue
        for own, other in names.items():
            name = name.replace(own, other)
        stored[name] = tensor
    save_file(stored, tmp_path / "model.safetensors")
    model: Any = load_model(read_spec(tmp_path))
    assert is_native(model)
    states = encode(model, PROMPTS, ops_of(model))
    for own, prompt in zip(states, PROMPTS, strict=True):
        torch.testing.assert_close(own, hidden_states(reference, prompt), atol=1e-4, rtol=0)
    if head != "Model":
        with torch.inference_mode():
            got = model.classify(torch.stack([each[0] for each in states]).float().to(DEVICE)).cpu()
            expected = [reference(input_ids=torch.tensor([prompt])).logits[0] for prompt in PROMPTS]
        torch.testing.assert_close(got, torch.stack(expected), atol=1e-5, rtol=0)
