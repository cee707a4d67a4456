"""What configs of LFM2 say in other words, and what they may not say."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Lfm2Config

from quire.core.errors import ModelLoadError
from tests.executor.models.test_models import expected_logprobs
from tests.executor.paged_driver import PagedDriver, load_model, read_spec

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with one embedding for both ends, as all released ones have."""
    config = Lfm2Config(
        vocab_size=320, hidden_size=64, intermediate_size=144, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, full_attn_idxs=[1], block_multiple_of=32, block_ffn_dim_multiplier=1.1,
        architectures=["Lfm2ForCausalLM"],
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("lfm2")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def test_fields_of_older_configs(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    token_ids = list(range(3, 60))
    expected = expected_logprobs(folder, token_ids)
    older: dict[str, Any] = {"tie_embedding": True, "block_ff_dim": config["intermediate_size"], "layer_types": None}
    for overrides in ({}, {**older, "tie_word_embeddings": False, "intermediate_size": 7}):
        model = load_model(read_spec(folder, **overrides))
        got = PagedDriver(model, 1, 64).step({0: token_ids})[0].log_softmax(dim=-1)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def test_other_kinds_of_layers_are_refused(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="layer_types must name conv or full_attention for each of 3 layers"):
        load_model(read_spec(folder, layer_types=["conv", "full_attention", "mamba"]))
