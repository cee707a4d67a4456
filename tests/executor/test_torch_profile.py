"""A profile that cannot be written harms no step."""

from pathlib import Path

import msgspec
import pytest
import torch

from quire.core.config.observability import ProfilerConfig
from quire.core.wire.protocol import StartProfile
from quire.core.wire.rank import Rank
from quire.executor.torch_profile import TorchProfile


def test_a_recording_that_ends_by_itself_and_finds_no_folder_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    config = ProfilerConfig(profiler="torch", torch_profiler_dir=str(tmp_path / "file" / "profiles"), max_iterations=1)
    profile = TorchProfile(config, Rank(), torch.device("cpu"))
    profile.start(msgspec.msgpack.encode(StartProfile()))
    assert profile.is_running
    profile.step()
    assert not profile.is_running
    assert "the profile cannot be written" in caplog.text
    assert profile.stop(b"") == b""
