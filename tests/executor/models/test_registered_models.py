"""Classes that a program registers for an architecture."""

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

import quire
from quire.core.config.model import ModelConfig
from quire.core.errors import ConfigError, ModelLoadError
from quire.executor.models.dense.llama import LlamaForCausalLM
from quire.frontend.checkpoint import registered_models
from quire.frontend.checkpoint.model_spec import read_model_spec
from tests.executor.paged_driver import Checkpoints, PagedDriver, load_model

torch.set_num_threads(1)


class Doubled(LlamaForCausalLM):
    """Llama, sure of itself."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return 2 * super().compute_logits(hidden)


def test_a_registered_class_is_built(checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registered_models, "_registered", {})
    folder = checkpoint("llama")
    native = read_model_spec(folder, ModelConfig(model=str(folder)))
    quire.register_model("LlamaForCausalLM", f"{__name__}:Doubled")
    spec = read_model_spec(folder, ModelConfig(model=str(folder)))
    plain, doubled = (PagedDriver(load_model(each), 1, 16).step({0: [3, 4]})[0] for each in (native, spec))
    assert torch.equal(doubled, 2 * plain)
    with pytest.raises(ModelLoadError, match=r"registered for LlamaForCausalLM, cannot be imported.*PYTHONPATH"):
        load_model(replace(spec, model_class="nowhere.at_all:Model"))
    with pytest.raises(ConfigError, match="must be 'module:Class'"):
        quire.register_model("LlamaForCausalLM", "nowhere")


def test_an_installed_package_names_its_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "plugin-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[quire.models]\nMyForCausalLM = plugin.models:MyModel\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert registered_models.find_model("MyForCausalLM") == "plugin.models:MyModel"
    assert registered_models.find_model("OtherForCausalLM") is None
