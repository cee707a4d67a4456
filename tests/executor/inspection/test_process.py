"""Questions that end before their answer: by Ctrl-C, or by a disk that takes no more."""

import io
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quire.executor.inspection.process import main
from quire.frontend.cli.main import QUIRE
from tests.executor.paged_driver import Checkpoints


class Interrupted(io.BytesIO):
    """A question during which Ctrl-C is pressed."""

    def read(self, size: int | None = -1) -> bytes:
        raise KeyboardInterrupt


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Within this context, the process and those that it starts write no longer files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_ctrl_c_leaves_the_last_word_to_the_command_that_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["process", "plan"])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(Interrupted()))
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 130


@pytest.mark.parametrize("command", ["pack", "save-sharded-state"])
def test_a_full_disk_is_told_with_the_folder_and_the_remedy(
    command: str,
    checkpoint: Checkpoints,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("QUIRE_DISABLED_KERNELS", "cpu_native")  # whose first use may have to write them
    model, folder = str(checkpoint("llama")), str(tmp_path / "new")
    with files_of_at_most(64 << 10):
        assert QUIRE.run("quire", [command, model, "--output", folder]) == 1
    said = capfd.readouterr().err
    assert f"--output: cannot write to {folder}: " in said
    assert "File too large" in said
    assert "Free space there" in said
    assert "Traceback" not in said
