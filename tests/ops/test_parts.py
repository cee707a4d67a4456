"""Libraries of kernels that only some models need: loaded, or built, before the model's first step."""

from collections.abc import Collection
from pathlib import Path

import httpx
import pytest
import torch

from quire.ops.backend import ModelNeeds
from quire.ops.cpu.libraries import Kernels
from quire.ops.cpu.native import NativeBackend
from quire.ops.cpu.onednn import OneDnnLinear
from quire.ops.eager.backend import EagerBackend
from tests.ops.levels import RUNNABLE
from tests.servers import ServerProcess

PLAIN = torch.bfloat16


@pytest.mark.parametrize(
    ("cache_dtypes", "has_latents", "has_states", "expected"),
    [
        ([], False, False, []),
        ([PLAIN, torch.float16, torch.float32], False, False, []),
        ([PLAIN, torch.int8], False, False, ["codes"]),
        ([torch.float8_e4m3fn], False, False, ["codes"]),
        ([torch.uint8], False, True, ["codes", "recurrent"]),
        ([PLAIN], True, False, ["latent"]),
        ([PLAIN], False, True, ["recurrent"]),
    ],
)
def test_a_model_gets_the_parts_that_it_needs(
    cache_dtypes: Collection[torch.dtype], has_latents: bool, has_states: bool, expected: list[str]
) -> None:
    level, asked = RUNNABLE[0], []

    def find(part: str) -> Path:
        asked.append(part)
        return level.library(part)

    ops = NativeBackend(Kernels(level.level, find), EagerBackend(OneDnnLinear()))
    for _ in range(2):
        ops.prepare(ModelNeeds(cache_dtypes, has_latents=has_latents, has_states=has_states))
    assert asked == ["", *expected]
    ops.prepare(ModelNeeds(cache_dtypes, has_latents=has_latents, has_states=has_states, has_adapters=True))
    assert asked == ["", *expected, "low_rank"]


def test_a_server_has_them_before_it_is_ready(tmp_path: Path) -> None:
    RUNNABLE[0].library("codes")  # skips the test without a compiler
    server = ServerProcess(tmp_path, "--kv-cache-dtype", "int8", env={"QUIRE_LOGGING_LEVEL": "DEBUG"})
    try:
        before = server.wait_until_ready().logs()
        asked = {"prompt": "Hello", "max_tokens": 4}
        assert httpx.post(f"{server.base_url}/v1/completions", json=asked, timeout=60).status_code == 200
        assert "CPU kernels (codes): " in before
        assert server.logs().count("CPU kernels") == before.count("CPU kernels")
    finally:
        server.stop()
