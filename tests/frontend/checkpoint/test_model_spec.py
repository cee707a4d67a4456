"""Facts of a checkpoint, read from its config.json."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.core.config.model import ModelConfig
from quire.core.config.resolved import ModelSpec
from quire.core.errors import ConfigError
from quire.frontend.checkpoint.model_spec import read_model_spec

MAMBA = {
    "architectures": ["MambaForCausalLM"],
    "vocab_size": 9,
    "num_hidden_layers": 2,
    "hidden_size": 30,
    "dtype": "float32",
}


def read(folder: Path, **config: Any) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(config))
    return read_model_spec(folder, ModelConfig(model=str(folder)))


def test_a_state_space_model_has_neither_positions_nor_attention(tmp_path: Path) -> None:
    assert read(tmp_path, **MAMBA, state_size=16).max_position_embeddings == 2**20
    mamba2 = read(tmp_path, **MAMBA, state_size=16, num_heads=8, head_dim=7)
    assert (mamba2.num_attention_heads, mamba2.head_dim) == (8, 7)
    for own in ({"attention_hidden_size": 64, "context_length": 1024}, {"inference_state_dtype": "float32"}):
        assert read(tmp_path, **MAMBA, **own).max_position_embeddings == 2**20  # RWKV, xLSTM


def test_the_length_may_be_the_models_in_name(tmp_path: Path) -> None:
    assert read(tmp_path, **MAMBA, num_attention_heads=2, model_max_length=4096).max_position_embeddings == 4096


def test_a_sequence_begins_behind_the_position_of_padding(tmp_path: Path) -> None:
    config = {**MAMBA, "model_type": "xlm-roberta", "num_attention_heads": 2, "max_position_embeddings": 514}
    assert read(tmp_path, **config).max_position_embeddings == 512
    assert read(tmp_path, **config, pad_token_id=0).max_position_embeddings == 513
    for padding in (None, "1", 600):
        with pytest.raises(ConfigError, match="pad_token_id must be a number from 0 to 512"):
            read(tmp_path, **config, pad_token_id=padding)


def test_a_list_of_layers_may_stand_for_their_number(tmp_path: Path) -> None:
    config = {name: value for name, value in MAMBA.items() if name != "num_hidden_layers"}
    spec = read(tmp_path, **config, num_attention_heads=2, layers_block_type=["mlp", "linear_attention"])
    assert spec.num_layers == 2


def test_other_models_say_how_many_heads_they_have(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="num_attention_heads"):
        read(tmp_path, **{**MAMBA, "architectures": ["OwnForCausalLM"]})
    assert read(tmp_path, **MAMBA, state_size=16, num_attention_heads=2).max_position_embeddings == 2048


def test_the_outer_ends_of_an_output_count(tmp_path: Path) -> None:
    """As in `GenerationConfig.from_model_config`."""
    text = {**{name: value for name, value in MAMBA.items() if name != "architectures"}, "num_attention_heads": 2}
    outer = {"architectures": MAMBA["architectures"]}
    for inner in ({}, {"eos_token_id": 3}):
        spec = read(tmp_path, **outer, eos_token_id=[1, 2], text_config={**text, **inner})
        assert spec.eos_token_ids == [1, 2]
    assert read(tmp_path, **outer, text_config={**text, "eos_token_id": 3}).eos_token_ids == [3]


@pytest.mark.parametrize("field", ["model_type", "rope_parameters", "architectures", "type_vocab_size", "pad_token_id"])
def test_fields_of_a_wrong_type_are_told_with_the_file(tmp_path: Path, field: str) -> None:
    config = {**MAMBA, "num_attention_heads": 2, "model_type": "xlm-roberta", "max_position_embeddings": 64}
    with pytest.raises(ConfigError, match=r"config\.json"):
        read(tmp_path, **{**config, field: [[]], "rope_theta": "x"})


@pytest.mark.parametrize("name", ["num_hidden_layers", "n_layer", "vocab_size", "hidden_size", "num_experts"])
def test_impossible_sizes_are_refused_at_once(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} is 1000000000000; models have at most \d+"):
        read(tmp_path, **{**MAMBA, "num_attention_heads": 2, name: 10**12})
