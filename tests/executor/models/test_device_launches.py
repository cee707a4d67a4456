"""The kernels of a decode step on an accelerator that is not there: ours, which do not run, and those of torch."""

from pathlib import Path
from typing import Any

import pytest

from quire.ops.triton.launch import Kernel
from tests.executor.models.tiny_models import write_checkpoint
from tests.executor.paged_driver import PagedDriver, load_model, read_spec
from tests.executor.pretend_device import Launches, PretendDevice

PROMPTS, STEP = {0: list(range(3, 33)), 1: [7, 5, 9]}, {0: [11], 1: [12]}
MOST = 7
"""A norm with the sum before it, a projection, attention with rotation and cache; twice a projection and the norm, and
the gated projection.
"""


def launches(
    folder: Path, model_type: str, num_layers: int, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> list[str]:
    """The kernels of a step of two rows, for so many layers."""
    folder.mkdir()
    write_checkpoint(folder, model_type, num_hidden_layers=num_layers, **settings)
    spec = read_spec(folder, dtype="bfloat16")
    with PretendDevice() as device, Launches() as seen:
        monkeypatch.setattr(Kernel, "__call__", lambda self, *_, **__: seen.names.append(self.name))
        driver = PagedDriver(load_model(spec, device="cuda"), 2, 64, device="cuda")
        driver.sends_rows = True
        driver.step(PROMPTS)
        seen.names.clear()
        with device.without_reads():
            driver.launch(STEP)
        return seen.names


@pytest.mark.parametrize("model_type", ["qwen3", "llama", "qwen2", "mistral"])
def test_a_layer_is_seven_launches(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (
        launches(tmp_path / str(count), model_type, count, monkeypatch, layer_types=["full_attention"] * count)
        for count in (2, 4)
    )
    added = list(many)
    for name in few:
        added.remove(name)
    assert len(added) == 2 * MOST, added
    assert "rotate_and_attend" in added
