"""EAGLE and EAGLE-3: drafts equal those of whole sequences in Llama's layers, and change no token."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

from quire.core.errors import ConfigError, ModelLoadError
from quire.core.wire.rank import Layout, Rank
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.worker import Worker
from tests.executor.step.drafting.head_references import (
    HIDDEN,
    Target,
    check_drafts,
    drafts_after,
    rms_norm,
    serve,
    some_requests,
    watched,
    with_heads,
)
from tests.executor.step.test_drafts import check_same
from tests.executor.step.test_model_runner import engine_config
from tests.executor.thread_group import on_every_rank

torch.set_num_threads(1)

NUM_LAYERS = 6
DRAFT_VOCAB = 96
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN, "intermediate_size": 80, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 1, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "vocab_size": 320,
    "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


class Layers:
    """Draft layers of Transformers, which the reference calls one by one."""

    def __init__(self, sizes: dict[str, Any], *, wide: bool, seed: int) -> None:
        torch.manual_seed(seed)
        is_qwen = sizes.get("model_type") == "qwen3"
        config = (Qwen3Config if is_qwen else LlamaConfig)(**sizes, attn_implementation="eager")
        self.body = (Qwen3Model if is_qwen else LlamaModel)(config).eval()
        for layer in self.body.layers[: 1 if wide else 0]:
            for name in ("q_proj", "k_proj", "v_proj"):
                narrow = getattr(layer.self_attn, name)
                setattr(layer.self_attn, name, nn.Linear(2 * HIDDEN, narrow.out_features, bias=False))
        for parameter in self.body.parameters():
            noise = torch.randn(parameter.shape)
            parameter.data.copy_(1 + 0.2 * noise if parameter.dim() == 1 else noise * (2 / parameter.shape[-1] ** 0.5))

    def tensors(self) -> dict[str, Tensor]:
        return {name: each for name, each in self.body.state_dict().items() if name.startswith("layers.")}

    def attend(self, index: int, x: Tensor) -> Tensor:
        """Runs the attention of a layer, without its norm, on rows [num_tokens, hidden]."""
        size = len(x)
        places = self.body.rotary_emb(x[None], torch.arange(size)[None])
        mask = torch.full((size, size), float("-inf")).triu(1)[None, None]
        attention = self.body.layers[index].self_attn
        return attention(hidden_states=x[None], position_embeddings=places, attention_mask=mask)[0][0]


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors")
    return folder


def write_eagle(folder: Path, num_layers: int, *, bias: bool) -> tuple[Path, Callable[[Target], Any]]:
    """Writes a checkpoint as yuhuili/EAGLE-... are; returns it with the rule of its pairs."""
    sizes = {**SIZES, "num_hidden_layers": num_layers, "model_type": "llama"}
    layers = Layers(sizes, wide=False, seed=3)
    join, offset = torch.randn(HIDDEN, 2 * HIDDEN) * 0.15, torch.randn(HIDDEN) * 0.1 * bias
    own = {name: each for name, each in layers.tensors().items() if name != "layers.0.input_layernorm.weight"}
    own |= {"fc.weight": join, **({"fc.bias": offset} if bias else {})}
    write(folder, {**sizes, "architectures": ["LlamaForCausalLM"], "bias": bias}, own)

    def pairs(target: Target) -> Any:
        def run(token_ids: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
            x = torch.cat([target.embed(token_ids), hidden], 1) @ join.T + offset
            for index, layer in enumerate(layers.body.layers):
                x = x + layers.attend(index, layer.input_layernorm(x) if index else x)
                x = x + layer.mlp(layer.post_attention_layernorm(x))
            return x, target.head(x)

        return run

    return folder, pairs


def write_eagle3(
    folder: Path, variant: str, target_layers: list[int] | None
) -> tuple[Path, Callable[[Target], tuple[Any, Any]]]:
    """Writes a checkpoint of the authors' form, or of speculators'; returns it with what it makes of the target's
    states, and the rule of its pairs.
    """
    is_speculators = variant.startswith("speculators")
    num_layers = 2 if variant == "two layers" else 1
    sizes = {**SIZES, "num_hidden_layers": num_layers}
    sizes["model_type"] = "qwen3" if variant == "speculators-qwen3" else "llama"
    if sizes["model_type"] == "qwen3":
        sizes["head_dim"] = 24
    layers = Layers(sizes, wide=True, seed=4)
    own = layers.tensors()
    own["fc.weight"] = torch.randn(HIDDEN, 3 * HIDDEN) * 0.1
    own["layers.0.hidden_norm.weight"] = 1 + 0.2 * torch.randn(HIDDEN)
    own["norm.weight"] = 1 + 0.2 * torch.randn(HIDDEN)
    own["lm_head.weight"] = torch.randn(DRAFT_VOCAB, HIDDEN) * 0.3
    ids = torch.randperm(320, generator=torch.Generator().manual_seed(1))[:DRAFT_VOCAB].sort().values
    own["d2t"] = ids - torch.arange(DRAFT_VOCAB)
    own["t2d"] = torch.zeros(320, dtype=torch.bool).index_fill(0, ids, True)
    if variant == "fc norms":
        own |= {f"fc_norm.{index}.weight": 1 + 0.2 * torch.randn(HIDDEN) for index in range(3)}
    if variant == "own embedding":
        own["embed_tokens.weight"] = torch.randn(320, HIDDEN) * 0.3
    stored = own
    if not is_speculators and num_layers == 1:
        stored = {name.replace("layers.0.", "midlayer."): each for name, each in own.items()}
    config: dict[str, Any] = {**sizes, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT_VOCAB}
    if variant == "fc norms":
        config |= {"fc_norm": True, "norm_output": True}
    if target_layers is not None:
        config["eagle_aux_hidden_state_layer_ids"] = target_layers
    if is_speculators:
        config = {
            "architectures": ["Eagle3Speculator"],
            "draft_vocab_size": DRAFT_VOCAB,
            "eagle_aux_hidden_state_layer_ids": target_layers,
            "speculators_model_type": "eagle3",
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
                "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "meta-llama/Llama-3.1-8B-Instruct"},
            },
            "transformer_layer_config": sizes,
        }
    write(folder, config, stored)
    adds_normed = is_speculators  # its configuration's default
    first, eps = layers.body.layers[0], 1e-5
    norm = rms_norm(own["norm.weight"], eps)

    def rules(target: Target) -> tuple[Any, Any]:
        after = target_layers or [2, NUM_LAYERS // 2, NUM_LAYERS - 3]

        def states(token_ids: list[int]) -> Tensor:
            found = target.outputs(token_ids, [layer - 1 for layer in after])
            if variant == "fc norms":
                parts = found.chunk(3, 1)
                norms = [rms_norm(own[f"fc_norm.{index}.weight"], eps) for index in range(3)]
                found = torch.cat([each(part) for each, part in zip(norms, parts, strict=True)], 1)
            return found @ own["fc.weight"].T

        def embed(token_ids: list[int]) -> Tensor:
            return own["embed_tokens.weight"][token_ids] if "embed_tokens.weight" in own else target.embed(token_ids)

        def run(token_ids: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
            normed = rms_norm(own["layers.0.hidden_norm.weight"], eps)(hidden)
            x = torch.cat([first.input_layernorm(embed(token_ids)), normed], 1)
            x = (normed if adds_normed else hidden) + layers.attend(0, x)
            x = x + first.mlp(first.post_attention_layernorm(x))
            for index, layer in enumerate(layers.body.layers[1:], 1):
                x = x + layers.attend(index, layer.input_layernorm(x))
                x = x + layer.mlp(layer.post_attention_layernorm(x))
            logits = torch.full((len(x), 320), float("-inf"))
            logits[:, ids] = norm(x) @ own["lm_head.weight"].T
            return norm(x) if variant == "fc norms" else x, logits

        return states, run

    return folder, rules


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama", num_hidden_layers=NUM_LAYERS)


@pytest.fixture(scope="module")
def without(folder: Path) -> Any:
    return serve(engine_config(folder))(some_requests())


@pytest.mark.parametrize(("num_layers", "bias"), [(1, False), (2, True)])
def test_eagle(
    num_layers: int, bias: bool, folder: Path, without: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, pairs = write_eagle(tmp_path / "eagle", num_layers, bias=bias)
    generate = serve(with_heads(folder, "eagle", heads))
    with watched(monkeypatch) as drafted:
        check_same(generate(some_requests(), long_prefill_token_threshold=20, enable_prefix_caching=False), without)
    target = Target(folder, NUM_LAYERS)
    run = pairs(target)
    check_drafts(drafted, lambda known: drafts_after(known, target.states(known), run))


@pytest.mark.parametrize(
    ("variant", "target_layers"),
    [
        ("authors", None),
        ("two layers", [1, 2, 5]),
        ("fc norms", [1, 3, 6]),
        ("own embedding", [2, 3, 4]),
        ("speculators", [1, 3, 4]),
        ("speculators-qwen3", [1, 3, 4]),
    ],
)
def test_eagle3(
    variant: str,
    target_layers: list[int] | None,
    folder: Path,
    without: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heads, rules = write_eagle3(tmp_path / "eagle3", variant, target_layers)
    generate = serve(with_heads(folder, "eagle3", heads))
    with watched(monkeypatch) as drafted:
        check_same(generate(some_requests(), long_prefill_token_threshold=20, enable_prefix_caching=False), without)
    states, run = rules(Target(folder, NUM_LAYERS))
    check_drafts(drafted, lambda known: drafts_after(known, states(known), run))


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_two_ranks_propose_the_same(
    method: Any, folder: Path, without: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if method == "eagle":
        heads, _ = write_eagle(tmp_path / "heads", 1, bias=True)
    else:
        heads, _ = write_eagle3(tmp_path / "heads", "authors", None)
    with watched(monkeypatch) as alone:
        serve(with_heads(folder, method, heads))(some_requests(), depth=1)
    config = with_heads(folder, method, heads, layout=Layout(tensor=2), executor="mp")
    with watched(monkeypatch) as together:
        first, second = on_every_rank(2, lambda group: serve(config, group)(some_requests(), depth=1))
    check_same(first, without)
    check_same(second, without)
    assert {(*known, *drafts) for known, drafts in together} == {(*known, *drafts) for known, drafts in alone}


def test_the_memory_plan_counts_the_layers(folder: Path, tmp_path: Path) -> None:
    heads, _ = write_eagle3(tmp_path / "heads", "authors", None)
    alone = Worker(engine_config(folder), Rank(), ParallelGroup()).load()
    both = Worker(with_heads(folder, "eagle3", heads), Rank(), ParallelGroup()).load()
    stored = (heads / "model.safetensors").stat().st_size
    assert both.weights_bytes - alone.weights_bytes == pytest.approx(stored, rel=0.1)
    assert sum(len(group.layers) for group in both.kv_groups) == NUM_LAYERS + 1


def test_layers_that_do_not_fit_are_refused(folder: Path, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    heads, _ = write_eagle3(tmp_path / "heads", "authors", [2, 3, 40])
    with pytest.raises(ConfigError, match=r"eagle_aux_hidden_state_layer_ids must be layers of .*, 1 to 6, got"):
        with_heads(folder, "eagle3", heads)
    eagle, _ = write_eagle(tmp_path / "eagle", 1, bias=False)
    with pytest.raises(ConfigError, match=r"hidden_size is 64, and that of .* is 32: take the layers"):
        with_heads(checkpoint("llama", hidden_size=32), "eagle", eagle)
    tensors = {"fc.weight": torch.zeros(HIDDEN, 2 * HIDDEN)}
    broken = write(tmp_path / "broken", json.loads((eagle / "config.json").read_text()), tensors)
    with pytest.raises(ModelLoadError, match=r"layers\.0"):
        Worker(with_heads(folder, "eagle", broken), Rank(), ParallelGroup()).load()
