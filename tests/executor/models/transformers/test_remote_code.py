"""Models whose code lies in the checkpoint."""

import json
import logging
from pathlib import Path

import pytest
import torch

from quire.core.config.model import ModelConfig
from quire.core.errors import ModelLoadError
from quire.frontend.checkpoint.model_spec import read_model_spec
from tests.executor.paged_driver import Checkpoints, PagedDriver, load_model

torch.set_num_threads(1)

CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own_kind"

    def __init__(self, sureness=1.0, **others):
        super().__init__(**others)
        self.sureness = sureness

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * self.config.sureness
        return out
"""


@pytest.fixture
def folder(checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A Llama checkpoint that names classes of its own."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    folder = tmp_path / "own"
    folder.mkdir()
    for file in checkpoint("llama").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    names = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnForCausalLM"}
    config |= {"model_type": "own_kind", "architectures": ["OwnForCausalLM"], "auto_map": names, "sureness": 2.0}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own_code.py").write_text(CODE)
    return folder


def test_code_of_a_checkpoint_is_imported_where_it_is_trusted(
    folder: Path, checkpoint: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    plain_folder = checkpoint("llama")
    plain = load_model(read_model_spec(plain_folder, ModelConfig(model=str(plain_folder))))
    expected = PagedDriver(plain, 1, 16).step({0: [3, 4, 5]})[0]
    for overrides, sureness in (({}, 2.0), ({"sureness": 3.0}, 3.0)):
        options = ModelConfig(model=str(folder), trust_remote_code=True, hf_overrides=overrides)
        with caplog.at_level(logging.INFO):
            model = load_model(read_model_spec(folder, options))
        assert f"importing own_code.OwnForCausalLM of {folder}" in caplog.text
        torch.testing.assert_close(PagedDriver(model, 1, 16).step({0: [3, 4, 5]})[0], sureness * expected)


def test_code_of_a_checkpoint_is_not_imported_unasked(folder: Path) -> None:
    (folder / "own_code.py").write_text("raise SystemExit('imported')")
    with pytest.raises(ModelLoadError, match=r"not run without --trust-remote-code: own_code\.py\. Read it first"):
        load_model(read_model_spec(folder, ModelConfig(model=str(folder))))
