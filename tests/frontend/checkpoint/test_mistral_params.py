"""params.json of Mistral's own releases, as a model's specification."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.core.config.model import ModelConfig
from quire.core.errors import ConfigError
from quire.frontend.checkpoint.model_spec import read_model_spec

PARAMS: dict[str, Any] = {
    "dim": 64, "n_layers": 4, "head_dim": 16, "hidden_dim": 96, "n_heads": 8, "n_kv_heads": 2, "norm_eps": 1e-5,
    "vocab_size": 320, "rope_theta": 1e6, "max_seq_len": 4096, "dtype": "bfloat16",
}  # fmt: skip


def write(folder: Path, **changes: Any) -> Path:
    (folder / "params.json").write_text(json.dumps({**PARAMS, **changes}))
    return folder


def test_sizes(tmp_path: Path) -> None:
    spec = read_model_spec(write(tmp_path), ModelConfig())
    assert (spec.architecture, spec.dtype, spec.eos_token_ids) == ("MistralForCausalLM", "bfloat16", [2])
    assert (spec.num_layers, spec.hidden_size, spec.vocab_size) == (4, 64, 320)
    assert (spec.num_attention_heads, spec.num_kv_heads, spec.head_dim) == (8, 2, 16)
    assert spec.max_position_embeddings == 4096
    assert spec.hf_config["intermediate_size"] == 96
    assert (spec.hf_config["rope_theta"], spec.hf_config["rms_norm_eps"]) == (1e6, 1e-5)
    assert spec.hf_config["sliding_window"] is None  # a missing one would mean 4096


def test_config_json_wins_unless_the_format_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({
            "architectures": ["LlamaForCausalLM"], "vocab_size": 7, "hidden_size": 8, "num_hidden_layers": 1,
            "num_attention_heads": 1, "max_position_embeddings": 9,
        })
    )  # fmt: skip
    write(tmp_path)
    assert read_model_spec(tmp_path, ModelConfig()).vocab_size == 7
    assert read_model_spec(tmp_path, ModelConfig(config_format="hf")).vocab_size == 7
    assert read_model_spec(tmp_path, ModelConfig(config_format="mistral")).vocab_size == 320


def test_windows(tmp_path: Path) -> None:
    one = read_model_spec(write(tmp_path, sliding_window=128), ModelConfig())
    assert (one.architecture, one.hf_config["sliding_window"]) == ("MistralForCausalLM", 128)
    mixed = read_model_spec(write(tmp_path, sliding_window=[None, 128]), ModelConfig())
    assert (mixed.architecture, mixed.hf_config["sliding_window"]) == ("MinistralForCausalLM", 128)
    assert mixed.hf_config["layer_types"] == ["full_attention", "sliding_attention"] * 2
    with pytest.raises(ConfigError, match=r"params\.json: sliding_window must repeat one size"):
        read_model_spec(write(tmp_path, sliding_window=[64, 128]), ModelConfig())


def test_yarn(tmp_path: Path) -> None:
    yarn = {"factor": 8, "original_max_position_embeddings": 4096, "beta": 32, "alpha": 1, "apply_scale": False}
    rope = read_model_spec(write(tmp_path, yarn=yarn), ModelConfig()).hf_config["rope_parameters"]
    assert (rope["rope_type"], rope["factor"], rope["beta_fast"], rope["beta_slow"]) == ("yarn", 8, 32, 1)
    assert (rope["attention_factor"], rope["rope_theta"]) == (1.0, 1e6)


def test_what_is_no_dense_decoder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"more than a dense decoder \(moe\).*--config-format mistral"):
        read_model_spec(write(tmp_path, moe={"num_experts": 8}), ModelConfig())


def test_a_missing_params_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no params\.json"):
        read_model_spec(tmp_path, ModelConfig(config_format="mistral"))
