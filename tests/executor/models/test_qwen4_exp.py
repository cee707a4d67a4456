"""Qwen4-Exp beyond what `test_hybrid_models.py` compares with Transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.core.config.model import ModelConfig
from quire.core.errors import ModelLoadError
from quire.executor.layers.attention import compressed_rows
from quire.executor.layers.attention.compressed_rows import RowPlaces
from quire.executor.models.base import Model
from quire.frontend.checkpoint.model_spec import read_model_spec
from quire.ops.latent import CacheRows
from tests.executor.models.tiny_models import Reference, write_checkpoint
from tests.executor.paged_driver import PagedDriver, load_model, read_spec

torch.set_num_threads(1)

PROMPT = [(37 * place * place + 11 * place) % 317 + 3 for place in range(60)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen4_exp")
    write_checkpoint(path, "qwen4_exp_text")
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return load_model(read_spec(folder))


def logits_of(model: Model, *parts: list[int]) -> Tensor:
    """Of one sequence, a part a step."""
    driver = PagedDriver(model, 1, 64, block_size=4)
    return torch.cat([driver.step({0: part})[0] for part in parts])


def test_n_grams_do_not_reach_beyond_the_end_of_a_text(model: Model, folder: Path) -> None:
    """Also when a step begins with one, behind it, or two tokens later."""
    token_ids, end = list(PROMPT), 2
    for place in (0, 7, 8, 20, 31, 33):
        token_ids[place] = end
    expected = Reference(folder).logprobs(token_ids)
    for borders in ([20, 31], [8, 21, 34], [9, 22, 33]):
        parts = [token_ids[begin:stop] for begin, stop in zip([0, *borders], [*borders, 60], strict=True)]
        torch.testing.assert_close(logits_of(model, *parts).log_softmax(-1), expected, atol=1e-4, rtol=0)


def test_blocks_of_long_sequences_are_scored_for_few_tokens_at_once(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """60 tokens have 15 blocks of 4; and the places of what is chosen are found for few tokens at once."""
    expected = logits_of(model, PROMPT)
    complete, at, found, chosen = RowPlaces.complete, RowPlaces.at, [], []

    def noted(places: RowPlaces, cache: Tensor, rate: int) -> CacheRows:
        rows = complete(places, cache, rate)
        found.append(rows.slots.numel())
        return rows

    def noted_places(places: RowPlaces, positions: Tensor) -> Tensor:
        chosen.append(positions.numel())
        return at(places, positions)

    monkeypatch.setattr(RowPlaces, "complete", noted)
    monkeypatch.setattr(RowPlaces, "at", noted_places)
    monkeypatch.setattr(compressed_rows, "_SLOTS", 64)
    torch.testing.assert_close(logits_of(model, PROMPT), expected, atol=1e-5, rtol=0)
    assert max(found + chosen) <= 64
    assert sum(found) == 2 * 60 * 15


def test_company_and_chunks_do_not_change_a_token_of_bfloat16(folder: Path) -> None:
    """Tokens that see all before them (16 here) take the dense way, also in a step where others choose."""
    model = load_model(read_spec(folder, dtype="bfloat16"))

    def driver() -> PagedDriver:
        return PagedDriver(model, 2, 64, block_size=4, dtype=torch.bfloat16)

    alone, beside, chunks = driver().step({0: PROMPT[:12]}), driver().step({0: PROMPT[:12], 1: PROMPT}), driver()
    assert torch.equal(beside[0], alone[0])
    parts = [chunks.step({1: part})[1] for part in (PROMPT[:14], PROMPT[14:31], PROMPT[31:])]
    assert torch.equal(beside[1], torch.cat(parts))


def test_the_memory_of_what_is_chosen_is_planned(folder: Path) -> None:
    """A place in 4 bytes, of which a number of the model's has 2 or 4."""
    assert load_model(read_spec(folder, indexer_budget=4096)).activation_size >= 2 * 4096


def test_a_table_may_be_one_tensor_or_pieces_of_any_sizes(model: Model, folder: Path, tmp_path: Path) -> None:
    stored, expected = load_file(folder / "model.safetensors"), logits_of(model, PROMPT)
    name = "model.layers.{}.ple.ple_embedding.ngram_embedding.{}weight"
    whole, cut = (
        torch.cat([stored.pop(name.format(layer, f"shard_{piece}.")) for piece in range(2)]) for layer in (0, 2)
    )
    stored[name.format(0, "")] = whole
    for piece, rows in enumerate(cut.split([7, 1, len(cut) - 8])):
        stored[name.format(2, f"shard_{piece}.")] = rows.contiguous()
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    assert torch.equal(logits_of(load_model(read_spec(tmp_path)), PROMPT), expected)

    del stored[name.format(2, "shard_2.")]
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"layers.2.* has 8 rows in 2 pieces; config.json says \d+"):
        load_model(read_spec(tmp_path))


def test_the_text_of_a_checkpoint_for_images(model: Model, folder: Path, tmp_path: Path) -> None:
    text = json.loads((folder / "config.json").read_bytes())
    config = {
        "architectures": ["Qwen4ExpForConditionalGeneration"], "model_type": "qwen4_exp", "text_config": text,
        "vision_config": {"depth": 1}, "tie_word_embeddings": False,
    }  # fmt: skip
    stored = {
        name.replace("model.", "model.language_model.", 1): weight
        for name, weight in load_file(folder / "model.safetensors").items()
    }
    stored["model.visual.merger.norm.weight"] = torch.ones(4)
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = read_model_spec(tmp_path, ModelConfig(model=str(tmp_path), dtype="float32"))
    assert torch.equal(logits_of(load_model(spec), PROMPT), logits_of(model, PROMPT))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_its_layers_can_be_quantized(quantization: Any, model: Model, folder: Path) -> None:
    quantized = logits_of(load_model(read_spec(folder), quantization=quantization), PROMPT)
    assert not torch.equal(quantized, logits_of(model, PROMPT))
    distance = torch.cosine_similarity(quantized, logits_of(model, PROMPT)).mean()
    assert distance > (0.99 if quantization == "int8" else 0.8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layer_types": ["linear_attention"] * 3}, "layer_types must name .* for each of 4 layers"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types must name linear_attention, indexed_attention"),
        ({"indexer_budget": 18}, r"indexer_budget \(18\) a multiple of indexer_compress_ratio \(4\)"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads must be 1"),
        ({"indexer_n_heads": None}, "lacks 'indexer_n_heads'"),
        ({"eos_token_id": None}, "with ple_layer_ids, eos_token_id must be set"),
        ({"ple_embed_dim": 66}, r"ple_embed_dim \(66\) a multiple of heads_per_ngram \(2\)"),
        ({"output_gate_type": "tanh"}, "output_gate_type must be silu or sigmoid, got 'tanh'"),
    ],
)
def test_settings_that_make_no_model_are_named(settings: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(ModelLoadError, match=message):
        load_model(read_spec(folder, **settings))
