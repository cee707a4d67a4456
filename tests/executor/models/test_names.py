"""Checkpoints that name tensors in another way than the family whose class their config.json names."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from quire.core.config.model import ModelConfig
from quire.core.errors import ModelLoadError
from quire.executor.models.registry import is_native
from quire.frontend.checkpoint.model_spec import read_model_spec
from tests.executor.models.coverage import measure
from tests.executor.models.tiny_models import Reference, write_checkpoint
from tests.executor.paged_driver import load_model

torch.set_num_threads(1)

_EXAONE = {"num_layers": "num_hidden_layers", "layer_norm_epsilon": "rms_norm_eps", "activation_function": "hidden_act"}
_SARVAM = {
    "num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts", "use_qkv_bias": "attention_bias",
}  # fmt: skip


def rewrite(folder: Path, architecture: str, fields: dict[str, str]) -> None:
    """Gives config.json the names of the model's author: of its architecture, and of `fields` in Transformers."""
    path = folder / "config.json"
    config: dict[str, Any] = json.loads(path.read_text())
    config.update({own: config.pop(name) for own, name in fields.items()})
    config.update(architectures=[architecture], rope_theta=config.pop("rope_parameters")["rope_theta"])
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("model_type", "architecture", "fields"),
    [("exaone", "ExaoneForCausalLM", _EXAONE), ("sarvam_moe", "SarvamMoEForCausalLM", _SARVAM)],
)
def test_a_file_reads_its_authors_names(
    model_type: str, architecture: str, fields: dict[str, str], tmp_path: Path
) -> None:
    """As Transformers writes the checkpoint, and as its author does."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip("this Transformers does not have the model")
    write_checkpoint(tmp_path, model_type)
    reference = Reference(tmp_path)
    assert measure(tmp_path, reference, "quire").holds
    rewrite(tmp_path, architecture, fields)
    assert measure(tmp_path, reference, "auto").holds
    assert is_native(load_model(read_model_spec(tmp_path, ModelConfig(model=str(tmp_path)))))


@pytest.fixture
def renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint whose names of tensors Transformers knows, and Quire's file does not."""
    conversion_mapping.get_checkpoint_conversion_mapping("llama")  # makes the table
    table = conversion_mapping._checkpoint_conversion_mapping_cache
    renamings = {"llama": [WeightRenaming(r"\.norm_1\.", ".input_layernorm.")]}
    monkeypatch.setattr(conversion_mapping, "_checkpoint_conversion_mapping_cache", {**table, **renamings})
    write_checkpoint(tmp_path, "llama")
    return tmp_path


def test_the_librarys_class_reads_names_that_are_not_those_of_the_file(renamed: Path) -> None:
    file = renamed / "model.safetensors"
    assert any(".norm_1." in name for name in load_file(file))
    assert measure(renamed, Reference(renamed), "auto").holds
    with pytest.raises(ModelLoadError, match=r"no tensor 'model.layers.0.input_layernorm.weight'"):
        load_model(read_model_spec(renamed, ModelConfig(model=str(renamed), model_impl="quire")))


def test_a_tensor_that_neither_finds_is_named_once(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    save_file({name: x for name, x in load_file(file).items() if name != "model.norm.weight"}, file)
    with pytest.raises(ModelLoadError, match=r"^The checkpoint has no tensor 'model.norm.weight'\.[^']*$"):
        load_model(read_model_spec(tmp_path, ModelConfig(model=str(tmp_path))))
