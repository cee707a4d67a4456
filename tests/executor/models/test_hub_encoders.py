"""Encoders whose classes are code of the hub's own, against the formulas of their papers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.core.errors import ModelLoadError
from tests.executor.models.test_encoders import PROMPTS, encode, ops_of
from tests.executor.models.tiny_encoders import VOCAB_SIZE, hidden_states, write_encoder
from tests.executor.paged_driver import load_model, read_spec
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


TASKS = ["retrieval.query", "separation", "text-matching"]
RANK = 2


@pytest.fixture
def jina(tmp_path: Path) -> Path:
    """A checkpoint of Jina v3 as the hub has it: XLM-RoBERTa by its config.json, and parametrized weights."""
    write_encoder(tmp_path, "jina-v3")
    config = json.loads((tmp_path / "config.json").read_bytes())
    hub = {
        "architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta", "position_embedding_type": "rotary",
        "rotary_emb_base": 20000.0, "lora_adaptations": TASKS, "lora_alpha": 1, "lora_rank": RANK,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_parameters": None, **hub}))
    stored = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        module, _, kind = name.rpartition(".")
        if kind == "weight" and tensor.dim() == 2 and "token_type" not in name:
            out, size = tensor.shape
            sides = ((out, RANK), (RANK, size)) if "embeddings" in name else ((RANK, size), (out, RANK))
            stored[f"{module}.parametrizations.weight.original"] = tensor
            for factor, side in zip(("lora_A", "lora_B"), sides, strict=True):
                stored[f"{module}.parametrizations.weight.0.{factor}"] = torch.randn(len(TASKS), *side) * 0.2
        else:
            stored[name] = tensor
    save_file(stored, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("task", [None, *TASKS, "none"])
def test_adapters_of_jina_v3(jina: Path, task: str | None, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("reference")
    reference = write_encoder(folder, "jina-v3")
    if task != "none":
        adapted = load_file(jina / "model.safetensors")
        number = TASKS.index(task or "text-matching")
        weights = load_file(folder / "model.safetensors")
        for name in adapted:
            if name.endswith(".original"):
                module = name.removesuffix(".parametrizations.weight.original")
                a, b = (adapted[f"{module}.parametrizations.weight.0.{each}"][number] for each in ("lora_A", "lora_B"))
                weights[f"{module}.weight"] += (a @ b if "embeddings" in name else b @ a) / RANK
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        reference = type(reference).from_pretrained(folder, dtype=torch.float32).eval()
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


def test_a_task_without_an_adapter_is_refused(jina: Path) -> None:
    with pytest.raises(ModelLoadError, match="jina_task 'ranking' is none of the checkpoint's tasks, which are retri"):
        load_model(read_spec(jina, jina_task="ranking"))
