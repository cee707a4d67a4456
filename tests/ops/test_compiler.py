"""Building the CPU kernels: once, by many at a time, and what happens where it cannot be done."""

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from quire.ops import bind, cpu
from quire.ops.cpu import compiler


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder, and a process that has not loaded the kernels yet."""
    monkeypatch.setenv("QUIRE_CACHE_ROOT", str(tmp_path / "cache"))
    compiler.load_kernels.cache_clear()
    yield tmp_path / "cache"
    compiler.load_kernels.cache_clear()


def test_many_builders_leave_one_library(fresh: Path) -> None:
    if cpu.load_kernels() is None:
        pytest.skip("this machine has no C++ compiler")
    library = compiler.build(compiler.cache_folder())
    library.unlink()
    with ThreadPoolExecutor(3) as pool:
        built = set(pool.map(compiler.build, [compiler.cache_folder()] * 3))
    assert built == {library}
    assert list((fresh / "cpu_kernels").iterdir()) == [library]
    before = library.stat().st_mtime_ns
    assert compiler.build(compiler.cache_folder()) == library
    assert library.stat().st_mtime_ns == before


def test_without_a_compiler_torch_serves(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    with caplog.at_level(logging.WARNING):
        backend = bind("cpu")
        bind("cpu")
    assert not isinstance(backend, cpu.NativeBackend)
    assert backend.silu_and_mul(torch.zeros(1, 2)).shape == (1, 1)
    (record,) = caplog.records
    assert "/nonexistent/c++" in record.getMessage()


def test_sources_that_do_not_compile_are_told_in_one_line(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "broken.cpp").write_text("int here = there;\n")
    monkeypatch.setattr(compiler, "_SOURCES", tmp_path)
    with caplog.at_level(logging.WARNING):
        assert compiler.load_kernels() is None
    (record,) = caplog.records
    assert "\n" not in record.getMessage()


def test_a_cache_that_cannot_be_written(
    tmp_path: Path, fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("QUIRE_CACHE_ROOT", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        assert compiler.load_kernels() is None
    assert len(caplog.records) == 1


def test_kernels_may_be_disabled(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("QUIRE_DISABLED_KERNELS", "other,cpu_native")
    assert compiler.load_kernels() is None
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
