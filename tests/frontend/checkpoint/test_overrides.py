"""`--hf-overrides` on configurations in the form of Transformers 5 and in older ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.core.config.model import ModelConfig
from quire.core.config.resolved import ModelSpec
from quire.core.errors import ConfigError
from quire.frontend.checkpoint.model_spec import read_model_spec

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "max_position_embeddings": 128, "dtype": "float32", "eos_token_id": 7,
}  # fmt: skip
NEW = {"rope_type": "default", "rope_theta": 500.0}
LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
BY_KIND = {"full_attention": {**NEW, "rope_theta": 1e6}, "sliding_attention": NEW}
TEXT = {name: value for name, value in CONFIG.items() if name != "architectures"}


def read(folder: Path, config: dict[str, Any], overrides: dict[str, Any]) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    return read_model_spec(folder, ModelConfig(model=str(folder), hf_overrides=overrides))


@pytest.mark.parametrize(
    ("parameters", "overrides", "expected"),
    [
        (NEW, {"rope_theta": 7.0}, {**NEW, "rope_theta": 7.0}),
        (NEW, {"rope_scaling": LINEAR}, {"rope_theta": 500.0, **LINEAR}),
        (NEW, {"rope_scaling": YARN, "rope_theta": 7.0}, {**YARN, "rope_type": "yarn", "rope_theta": 7.0}),
        (NEW, {"partial_rotary_factor": 0.5}, {**NEW, "partial_rotary_factor": 0.5}),
        ({**LINEAR, "rope_theta": 500.0}, {"rope_scaling": None}, NEW),
        ({**LINEAR, "rope_theta": 5}, {"rope_scaling": {"factor": 2}}, {**LINEAR, "rope_theta": 5, "factor": 2}),
        (NEW, {"rope_parameters": LINEAR}, {"rope_theta": 500.0, **LINEAR}),
        (NEW, {"rope_parameters": {"rope_theta": 7.0}}, {**NEW, "rope_theta": 7.0}),
        (BY_KIND, {"rope_theta": 7.0}, {**BY_KIND, "full_attention": {**NEW, "rope_theta": 7.0}}),
        (BY_KIND, {"rope_local_base_freq": 7.0}, {**BY_KIND, "sliding_attention": {**NEW, "rope_theta": 7.0}}),
        (BY_KIND, {"rope_scaling": LINEAR}, {**BY_KIND, "full_attention": {"rope_theta": 1e6, **LINEAR}}),
        (
            {"full_attention": NEW, "sliding_attention": NEW},
            {"rope_theta": 7.0},
            {kind: {**NEW, "rope_theta": 7.0} for kind in BY_KIND},
        ),
    ],
)  # fmt: skip
def test_either_name_changes_the_rotation(
    parameters: dict[str, Any], overrides: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    config = read(tmp_path, {"rope_parameters": parameters}, overrides).hf_config
    assert config["rope_parameters"] == expected
    assert not config.get("rope_scaling")


def test_another_kind_takes_the_place_of_an_older_configurations(tmp_path: Path) -> None:
    old = {"rope_theta": 500.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}}
    config = read(tmp_path, old, {"rope_scaling": YARN}).hf_config
    assert config["rope_scaling"] == {**YARN, "rope_type": "yarn"}
    assert config["rope_theta"] == 500.0
    assert read(tmp_path, old, {"rope_scaling": {"factor": 2.0}}).hf_config["rope_scaling"]["low_freq_factor"] == 1.0
    config = read(tmp_path, old, {"rope_parameters": LINEAR}).hf_config
    assert (config["rope_parameters"], config["rope_scaling"]) == (LINEAR, None)


def test_the_length_follows_an_override(tmp_path: Path) -> None:
    assert read(tmp_path, {"rope_parameters": NEW}, {"rope_scaling": LINEAR}).max_position_embeddings == 512
    assert read(tmp_path, {"rope_parameters": NEW, "rope_scaling": LINEAR}, {}).max_position_embeddings == 512


def test_a_rotation_that_older_names_cannot_mean_is_refused(tmp_path: Path) -> None:
    kinds = {"main": NEW, "compress": NEW}
    with pytest.raises(ConfigError, match=r"rope_theta cannot tell which of.*: main, compress\. Override"):
        read(tmp_path, {"rope_parameters": kinds}, {"rope_theta": 7.0})


def test_other_names_of_a_field(tmp_path: Path) -> None:
    assert read(tmp_path, {}, {"torch_dtype": "bfloat16"}).dtype == "bfloat16"
    assert read(tmp_path, {}, {"n_layer": 2}).num_layers == 2
    types = ["full_attention"] * 4
    assert "layer_types" not in read(tmp_path, {"layer_types": types}, {"max_window_layers": 2}).hf_config
    assert read(tmp_path, {"layer_types": types}, {"sliding_window": 2}).hf_config["layer_types"] == types


def test_a_wrappers_language_model_gets_what_is_its_own(tmp_path: Path) -> None:
    outer = {"architectures": CONFIG["architectures"], "model_type": "outer"}
    (tmp_path / "config.json").write_text(json.dumps({**outer, "text_config": {**TEXT, "rope_parameters": NEW}}))

    def spec(**overrides: Any) -> ModelSpec:
        return read_model_spec(tmp_path, ModelConfig(hf_overrides=overrides))

    assert spec().max_position_embeddings == 128
    for overrides in ({"max_position_embeddings": 64}, {"text_config": {"max_position_embeddings": 64}}):
        assert spec(**overrides).max_position_embeddings == 64
    assert spec(rope_theta=7.0).hf_config["rope_parameters"]["rope_theta"] == 7.0
    published = spec(rope_theta=7.0, model_type="other").config_json
    assert published["model_type"] == "other"
    assert published["text_config"]["rope_parameters"]["rope_theta"] == 7.0
    with pytest.raises(ConfigError, match="text_config must be an object, got 3"):
        spec(text_config=3)
