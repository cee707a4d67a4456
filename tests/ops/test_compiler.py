"""How a process loads the CPU kernels, and its warning if there are none."""

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from quire.ops import bind
from quire.ops.cpu import compiler, libraries
from quire.ops.cpu.builds import parts_of
from quire.ops.cpu.compiler import SOURCES
from quire.ops.cpu.native import NativeBackend


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder, and a process that has not loaded the kernels yet."""
    monkeypatch.setenv("QUIRE_CACHE_ROOT", str(tmp_path / "cache"))
    libraries.load_kernels.cache_clear()
    yield tmp_path / "cache"
    libraries.load_kernels.cache_clear()


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Sets CXX to a script that answers --version and otherwise runs `text`."""

    def make(text: str, version: str = "fake 1") -> Path:
        path = tmp_path / "fake++"
        path.write_text(
            f'#!/bin/sh\necho call >> {tmp_path}/calls\n[ "$2" = --version ] && exec echo {version}\n'
            f'case "$*" in *-fsyntax-only*) exit 0;; esac\n{text}\n'
        )
        path.chmod(0o755)
        monkeypatch.setenv("CXX", f"{path} --flag")
        return path

    return make


def warning_of(caplog: pytest.LogCaptureFixture) -> str:
    """The only line that a process without kernels logs, however often it binds the backend."""
    caplog.clear()
    libraries.load_kernels.cache_clear()
    with caplog.at_level(logging.WARNING):
        backend = bind("cpu")
        bind("cpu")
    assert not isinstance(backend, NativeBackend)
    assert backend.activate_and_mul(torch.zeros(1, 2)).shape == (1, 1)
    (record,) = caplog.records
    assert "\n" not in record.getMessage()
    return record.getMessage()


@pytest.mark.parametrize("command", ["/nonexistent/c++", "nonexistent-c++ -O1"])
def test_without_a_compiler_torch_serves(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, command: str
) -> None:
    monkeypatch.setenv("CXX", command)
    message = warning_of(caplog)
    assert repr(command.split()[0]) in message
    assert "Install g++, or name a compiler in CXX" in message
    assert not fresh.exists(), "nothing to remember"


def test_a_machine_with_no_compiler_at_all(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "Install g++" in warning_of(caplog)


def test_a_compiler_that_does_not_run(fresh: Path, fake: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    fake("").write_bytes(b"\x7fELF, but not really")
    assert "the compiler does not work" in warning_of(caplog)
    assert not fresh.exists()


def test_a_compiler_that_refuses_is_asked_once_until_it_is_another(
    fresh: Path, fake: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def num_calls() -> int:
        return len((tmp_path / "calls").read_text().splitlines())

    fake("echo 'x.cpp:3:1: error: what is this' >&2; exit 1")
    first = warning_of(caplog)
    assert "x.cpp:3:1: error: what is this" in first
    assert str(fresh / "cpu_kernels" / "kernels-") in first
    before = num_calls()
    assert warning_of(caplog) == first
    assert num_calls() == before + 1, "for its version"
    fake("echo 'x.cpp:3:1: error: still not' >&2; exit 1", version="fake 2")
    assert "still not" in warning_of(caplog)


def test_a_cache_that_cannot_be_written(
    tmp_path: Path, fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("QUIRE_CACHE_ROOT", str(tmp_path / "file"))
    assert "Set QUIRE_CACHE_ROOT to another folder" in warning_of(caplog)


def test_kernels_may_be_disabled(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("QUIRE_DISABLED_KERNELS", "other,cpu_native")
    assert libraries.load_kernels() is None
    assert not caplog.records
    assert not fresh.exists()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"QUIRE_CACHE_ROOT": "/a"}, "/a/cpu_kernels"),
        ({"VLLM_CACHE_ROOT": "/b"}, "/b/cpu_kernels"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/quire/cpu_kernels"),
        ({"HOME": "/d"}, "/d/.cache/quire/cpu_kernels"),
    ],
)
def test_cache_folder(environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("QUIRE_CACHE_ROOT", "VLLM_CACHE_ROOT", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert compiler.cache_folder() == Path(expected)


@pytest.mark.parametrize("text", ['while [ $# -gt 1 ]; do [ "$1" != -o ] || touch "$2"; shift; done', "exit 1"])
def test_kernels_are_built_ahead_where_no_package_is_installed(
    fresh: Path, fake: Callable[..., Path], text: str
) -> None:
    """As beside an installation. A compiler that refuses is for the first server to tell."""
    fake(text)
    command = [sys.executable, "-S", "-m", "quire.ops.cpu.build_ahead"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    made = [path.suffix for path in (fresh / "cpu_kernels").iterdir() if path.suffix != ".lock"]
    assert made == ([".failed"] if text == "exit 1" else [".so"] * (1 + len(parts_of(SOURCES))))
