"""DFlash: blocks of drafts equal those of whole sequences, and change no token."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model, apply_rotary_pos_emb

from quire.core.errors import ConfigError, ModelLoadError
from quire.core.wire.rank import Layout, Rank
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.step.drafting.block_drafts import BlockDrafts
from quire.executor.worker import Worker
from tests.executor.step.drafting.head_references import (
    HIDDEN,
    NUM_DRAFTS,
    Target,
    check_drafts,
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

NUM_LAYERS = 3
TARGET_LAYERS = [0, 2]
MASK = 317
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN, "intermediate_size": 80, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24,
    "num_hidden_layers": 2, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "vocab_size": 320,
    "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0, "model_type": "qwen3",
}  # fmt: skip


def write_dflash(
    folder: Path, *, is_speculators: bool = False, **own: Any
) -> tuple[Path, Callable[[Target], Callable[[list[int]], list[int]]]]:
    """Writes a checkpoint of the authors' form or of speculators'; returns it with the drafts after known tokens."""
    torch.manual_seed(6)
    body = Qwen3Model(Qwen3Config(**SIZES)).eval()
    for parameter in body.parameters():
        noise = torch.randn(parameter.shape)
        parameter.data.copy_(1 + 0.2 * noise if parameter.dim() == 1 else noise * (2 / parameter.shape[-1] ** 0.5))
    tensors = {name: each for name, each in body.state_dict().items() if not name.startswith("embed")}
    tensors["fc.weight"] = torch.randn(HIDDEN, len(TARGET_LAYERS) * HIDDEN) * 0.1
    tensors["hidden_norm.weight"] = 1 + 0.2 * torch.randn(HIDDEN)
    if is_speculators:
        config = {
            "architectures": ["DFlashSpeculator"],
            "speculators_model_type": "dflash",
            "aux_hidden_state_layer_ids": [layer + 1 for layer in TARGET_LAYERS],
            "mask_token_id": MASK,
            "transformer_layer_config": SIZES,
        }
    else:
        inner = {"mask_token_id": MASK, "target_layer_ids": TARGET_LAYERS, **own}
        config = {**SIZES, "architectures": ["DFlashDraftModel"], "block_size": 4, "dflash_config": inner}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")

    def rule(target: Target) -> Callable[[list[int]], list[int]]:
        @torch.inference_mode()
        def drafts(known: list[int]) -> list[int]:
            states = target.outputs(known[:-1], TARGET_LAYERS)
            context = rms_norm(tensors["hidden_norm.weight"], 1e-5)(states @ tensors["fc.weight"].T)
            x = target.embed([known[-1], *[MASK] * NUM_DRAFTS])
            first = len(context)
            cos, sin = body.rotary_emb(x[None], torch.arange(first + len(x))[None])
            for layer in body.layers:
                attention, normed = layer.self_attn, layer.input_layernorm(x)

                def heads(project: Any, rows: Tensor) -> Tensor:
                    return project(rows).unflatten(-1, (-1, 24))

                rows = torch.cat([context, normed])
                q = attention.q_norm(heads(attention.q_proj, normed)).transpose(0, 1)[None]
                k = attention.k_norm(heads(attention.k_proj, rows)).transpose(0, 1)[None]
                v = heads(attention.v_proj, rows).transpose(0, 1)[None]
                q, _ = apply_rotary_pos_emb(q, q, cos[:, first:], sin[:, first:])
                _, k = apply_rotary_pos_emb(k, k, cos, sin)
                out = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
                x = x + attention.o_proj(out[0].transpose(0, 1).flatten(1))
                x = x + layer.mlp(layer.post_attention_layernorm(x))
            return target.head(body.norm(x))[1:].argmax(-1).tolist()

        return drafts

    return folder, rule


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama", num_hidden_layers=NUM_LAYERS)


@pytest.mark.parametrize("is_speculators", [False, True])
def test_blocks_are_those_of_whole_sequences(
    is_speculators: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, rule = write_dflash(tmp_path / "heads", is_speculators=is_speculators)
    without = serve(engine_config(folder))(some_requests())
    generate = serve(with_heads(folder, "dflash", heads))
    with watched(monkeypatch, BlockDrafts) as drafted:
        check_same(generate(some_requests(), long_prefill_token_threshold=20), without)
        check_same(generate(some_requests(), depth=1), without)  # on the pages that the prefix cache found
    check_drafts(drafted, rule(Target(folder, NUM_LAYERS)))


def test_two_ranks_and_the_memory_plan(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heads, _ = write_dflash(tmp_path / "heads")
    alone = Worker(engine_config(folder), Rank(), ParallelGroup()).load()
    both = Worker(with_heads(folder, "dflash", heads), Rank(), ParallelGroup()).load()
    stored = (heads / "model.safetensors").stat().st_size
    assert both.weights_bytes - alone.weights_bytes == pytest.approx(stored, rel=0.1)
    assert sum(len(group.layers) for group in both.kv_groups) == NUM_LAYERS + 2
    without = serve(engine_config(folder))(some_requests())
    with watched(monkeypatch, BlockDrafts) as one:
        serve(with_heads(folder, "dflash", heads))(some_requests(), depth=1)
    divided = with_heads(folder, "dflash", heads, layout=Layout(tensor=2), executor="mp")
    with watched(monkeypatch, BlockDrafts) as two:
        first, second = on_every_rank(2, lambda group: serve(divided, group)(some_requests(), depth=1))
    check_same(first, without)
    check_same(second, without)
    assert {(*known, *drafts) for known, drafts in two} == {(*known, *drafts) for known, drafts in one}


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"use_swa": True}, "layers with windows"),
        ({"causal": True}, "see earlier ones alone"),
        ({"sample_from_anchor": True}, "in the place of the newest token"),
        ({"mask_token_id": None}, "no mask_token_id"),
    ],
)
def test_other_forms_are_refused(own: dict[str, Any], message: str, folder: Path, tmp_path: Path) -> None:
    heads, _ = write_dflash(tmp_path / "heads", **own)
    with pytest.raises(ModelLoadError, match=f"{message}.*take another draft"):
        Worker(with_heads(folder, "dflash", heads), Rank(), ParallelGroup()).load()


def test_layers_that_the_target_lacks_are_refused(folder: Path, tmp_path: Path) -> None:
    heads, _ = write_dflash(tmp_path / "heads", target_layer_ids=[1, 3])
    with pytest.raises(ConfigError, match=r"target_layer_ids of dflash_config must be layers of .*, 0 to 2, got"):
        with_heads(folder, "dflash", heads)
