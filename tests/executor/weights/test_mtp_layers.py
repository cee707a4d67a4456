"""Layers for multi-token prediction: found in the config.json of each family that has them, or in its tensors."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.core.wire.rank import Rank
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.weights.mtp_layers import num_mtp_layers
from quire.executor.worker import Worker
from tests.executor.models.test_hybrid_models import folder  # noqa: F401
from tests.executor.models.test_models import expected_logprobs
from tests.executor.paged_driver import Checkpoints, PagedDriver
from tests.executor.step.test_model_runner import engine_config

torch.set_num_threads(1)

FIELDS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
LAYER = "self_attn.o_proj.weight"
FAMILIES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "glm4_moe": ({"num_nextn_predict_layers": 1}, ["model.layers.2.eh_proj.weight", f"model.layers.2.{LAYER}"]),
    "ernie4_5_moe": ({"num_nextn_predict_layers": 1}, [f"model.mtp_block.0.{LAYER}", "model.mtp_linear_proj.0.weight"]),
    "qwen2": ({"num_nextn_predict_layers": 1}, [f"model.mtp_layers.0.{LAYER}"]),  # as MiMo has
    "qwen3-next": ({}, ["mtp.fc.weight", f"mtp.layers.0.{LAYER}"]),
    "qwen4-exp": ({}, ["mtp.fc.weight", f"mtp.layers.0.{LAYER}"]),
    "qwen3.5": ({"mtp_num_hidden_layers": 1}, ["mtp.fc.weight", f"mtp.layers.0.{LAYER}"]),
}


@pytest.mark.turns(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_told_and_left_out(
    family: str, checkpoint: Checkpoints, request: pytest.FixtureRequest, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    fields, names = FAMILIES[family]
    is_hybrid = family.startswith(("qwen3", "qwen4"))
    plain = request.getfixturevalue("folder")(family) if is_hybrid else checkpoint(family, num_hidden_layers=2)
    own = tmp_path / "with more layers"
    shutil.copytree(plain, own)
    extra = {name: torch.ones(64, 64) for name in names}
    save_file({**load_file(own / "model.safetensors"), **extra}, own / "model.safetensors")
    config = json.loads((own / "config.json").read_text())
    without = {name: value for name, value in config.items() if name not in FIELDS}
    (own / "config.json").write_text(json.dumps({**without, **fields}))
    worker = Worker(engine_config(own), Rank(), ParallelGroup())
    with caplog.at_level("INFO"):
        worker.load()
    assert "layers for multi-token prediction are not loaded: 1" in caplog.text
    token_ids = list(range(40))
    got = PagedDriver(worker.get_model(), 1, 64).step({0: token_ids})[0].log_softmax(dim=-1)
    torch.testing.assert_close(got, expected_logprobs(plain, token_ids), atol=1e-4, rtol=0)


def test_a_checkpoint_without_them_has_none() -> None:
    assert num_mtp_layers({"num_nextn_predict_layers": 0}, ["model.layers.0.mlp.weight", "smtp.layers.0.w"]) == 0
    assert num_mtp_layers({}, [f"mtp.layers.{index}.{name}" for index in (0, 2) for name in ("a.weight", "b")]) == 2
