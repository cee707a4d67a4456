"""Checkpoints whose author names tensors differently, as whole models."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.core.config.load import LoadConfig
from quire.core.config.model import ModelConfig
from quire.executor.models.base import Model
from quire.executor.parallel.groups import ParallelGroup
from quire.frontend.checkpoint.model_spec import read_model_spec
from tests.executor.paged_driver import Checkpoints, PagedDriver, load_model, read_spec

torch.set_num_threads(1)
TOKENS = list(range(40))
MISTRAL = {
    "model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output", "model.layers": "layers",
    "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def logits(model: Model) -> torch.Tensor:
    return PagedDriver(model, 1, 64).step({0: TOKENS})[0]


def release(source: Path, folder: Path) -> Path:
    """The checkpoint in `source` in the form of Mistral's own releases: rotary pairs are neighbours."""
    config = json.loads((source / "config.json").read_bytes())
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        for part, count in heads.items():
            if f".{part}." in name:
                halves = tensor.view(count, 2, -1, tensor.shape[1])  # [heads, half, pair, hidden]
                tensor = halves.transpose(1, 2).reshape(tensor.shape)
        for ours, theirs in MISTRAL.items():
            name = name.replace(ours, theirs)
        tensors[name] = tensor.contiguous()
    save_file(tensors, folder / "consolidated.safetensors")
    params = {
        "dim": config["hidden_size"], "n_layers": config["num_hidden_layers"], "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"], "hidden_dim": config["intermediate_size"],
        "head_dim": config["head_dim"], "norm_eps": config["rms_norm_eps"], "vocab_size": config["vocab_size"],
        "rope_theta": config["rope_parameters"]["rope_theta"], "max_seq_len": config["max_position_embeddings"],
    }  # fmt: skip
    (folder / "params.json").write_text(json.dumps(params))
    return folder


@pytest.mark.parametrize("load_format", ["auto", "mistral"])
def test_a_release_of_mistrals_own_is_the_hubs_model(load_format: str, checkpoint: Checkpoints, tmp_path: Path) -> None:
    source = checkpoint("mistral")
    folder = release(source, tmp_path)
    load = LoadConfig(load_format=load_format)  # type: ignore[arg-type]
    model = load_model(read_model_spec(folder, ModelConfig()), load=load)
    torch.testing.assert_close(logits(model), logits(load_model(read_spec(source))), atol=1e-5, rtol=0)


def test_each_rank_reads_its_heads_of_a_release(checkpoint: Checkpoints, tmp_path: Path) -> None:
    source = checkpoint("mistral")
    spec = read_model_spec(release(source, tmp_path), ModelConfig())
    for rank in range(2):
        group = ParallelGroup(rank, 2)
        theirs, ours = load_model(spec, group=group), load_model(read_spec(source), group=group)
        for mine, expected in zip(_tensors(theirs), _tensors(ours), strict=True):
            assert torch.equal(mine, expected)


def _tensors(model: Model) -> list[torch.Tensor]:
    """The unpacked weights that attention keeps: q, k and v in one, as the backend got them."""
    found = []
    for layer in model._layers:  # type: ignore[attr-defined]
        x = torch.eye(model._norm._weight.shape[0])  # type: ignore[attr-defined]
        found.append(layer.attention._project(x))
    return found


@pytest.mark.parametrize(("old", "new"), [("model.", ""), ("model.", "transformer."), ("", "language_model.")])
def test_a_checkpoint_with_another_prefix_is_the_same_model(
    old: str, new: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    source = checkpoint("llama")
    shutil.copyfile(source / "config.json", tmp_path / "config.json")
    tensors = load_file(source / "model.safetensors")
    renamed = {new + name.removeprefix(old) if name.startswith(old) else name: t for name, t in tensors.items()}
    assert set(renamed) != set(tensors)
    save_file(renamed, tmp_path / "model.safetensors")
    assert torch.equal(logits(load_model(read_spec(tmp_path))), logits(load_model(read_spec(source))))
