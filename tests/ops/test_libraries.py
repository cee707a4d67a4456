"""Which library of kernels a process loads: by the processor, `QUIRE_CPU_ISA`, the compiler and what a wheel brings."""

import ctypes
import logging
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.core.errors import ConfigError
from quire.executor import backends
from quire.ops.cpu import isa_levels, libraries, shipping
from quire.ops.cpu.isa_levels import LEVELS, UnknownLevelError

SOURCE = """
#if defined(__AVX2__) || defined(__ARM_FEATURE_DOTPROD)
extern "C" int is_more_than_least() { return 1; }
#else
extern "C" int is_more_than_least() { return 0; }
#endif
extern "C" int quire_run_team() { return 7; }
"""
TEAM = """
int (*team)() = nullptr;
extern "C" void quire_join_team(int (*run)()) { team = run; }
"""
PART = 'extern int (*team)(); extern "C" int asks_the_team() { return team(); }'
V3 = "avx avx2 bmi1 bmi2 f16c fma abm movbe"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"
BF16 = f"{V4} avx512_vnni avx512_bf16"


@pytest.mark.parametrize(
    ("machine", "listed", "expected"),
    [
        ("x86_64", "sse2", "x86_64"),
        ("x86_64", V3, "avx2"),
        ("x86_64", f"{V3} avx512f", "avx2"),
        ("x86_64", f"{V3} avx_vnni", "avx2_vnni"),
        ("x86_64", f"{V4} avx_vnni", "avx512"),
        ("x86_64", V4, "avx512"),
        ("x86_64", f"{V4} avx512_vnni", "avx512_vnni"),
        ("x86_64", BF16, "avx512_bf16"),
        ("x86_64", f"{BF16} amx_tile amx_bf16 amx_int8", "amx"),
        ("x86_64", "", "native"),
        ("riscv64", "isa", "native"),
        ("aarch64", "fp asimd", "neon"),
        ("aarch64", "fp asimd asimdhp asimddp", "neon_dotprod"),
        ("aarch64", "fp asimd asimdhp asimddp i8mm bf16", "neon_bf16"),
    ],
)
def test_the_best_level_is_what_the_processor_has(
    machine: str, listed: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(isa_levels, "instruction_sets", lambda: frozenset(listed.split()))
    chosen = isa_levels.choose(None)
    assert chosen[0].name == expected
    assert isa_levels.choose("") == chosen
    for level in chosen:
        assert isa_levels.choose(level.name) == (level,)
    names = ", ".join(level.name for level in chosen)
    with pytest.raises(UnknownLevelError, match=f"^QUIRE_CPU_ISA must be one of {names}, which .*, got 'mmx'"):
        isa_levels.choose("mmx")
    for level in set(LEVELS.get(machine, ())) - set(chosen):
        with pytest.raises(UnknownLevelError, match=names):
            isa_levels.choose(level.name)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, an empty wheel, a process that has not loaded kernels yet, and sources that compile at once."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "one.cpp").write_text(SOURCE)
    (sources / "parts" / "some").mkdir(parents=True)
    (sources / "parts" / "team.cpp").write_text(TEAM)
    (sources / "parts" / "some" / "two.cpp").write_text(PART)
    monkeypatch.setattr(libraries, "SOURCES", sources)
    monkeypatch.setattr(shipping, "SOURCES", sources)
    monkeypatch.setattr(libraries, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setenv("QUIRE_CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.delenv("QUIRE_CPU_ISA", raising=False)
    libraries.SHIPPED.mkdir()
    libraries.load_kernels.cache_clear()
    yield tmp_path / "cache"
    libraries.load_kernels.cache_clear()


def loaded(caplog: pytest.LogCaptureFixture) -> str:
    """The level of the kernels that this process loads, and where they come from."""
    with caplog.at_level(logging.DEBUG, libraries.logger.name):
        assert libraries.load_kernels() is not None
    return caplog.messages[-1].removeprefix("CPU kernels: ")


@pytest.fixture
def best() -> isa_levels.Level:
    if len(isa_levels.available()) < 2 or shutil.which("g++") is None:
        pytest.skip("this machine has only one level, or no compiler")
    return isa_levels.available()[0]


def test_a_level_is_forced(best: isa_levels.Level, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for level, expected in [(best, 1), (isa_levels.available()[-1], 0)]:
        monkeypatch.setenv("QUIRE_CPU_ISA", level.name)
        libraries.load_kernels.cache_clear()
        kernels = libraries.load_kernels()
        assert isinstance(kernels, ctypes.CDLL)
        assert kernels["is_more_than_least"]() == expected


def test_a_level_that_the_processor_lacks_is_refused_where_a_worker_binds(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_CPU_ISA", "mmx")
    with pytest.raises(ConfigError, match=r"QUIRE_CPU_ISA must be one of .*, got 'mmx'"):
        backends.bind("cpu")


def test_an_old_compiler_builds_what_it_knows(
    best: isa_levels.Level, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    old = cache.parent / "old++"
    old.write_text(f'#!/bin/sh\ncase "$*" in *"{" ".join(best.flags)}"*) exit 1;; esac\nexec g++ "$@"\n')
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    assert loaded(caplog).startswith(f"{isa_levels.available()[1].name}, from {cache}")
    assert f"does not know this processor's {best.name}" in caplog.text


def test_a_wheels_library_needs_no_compiler(
    best: isa_levels.Level, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    built = Path(loaded(caplog).split(" from ")[1])
    lower = isa_levels.available()[1]
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    for level in (best, lower):  # the best level's, and, without that, a lower one's
        shipped = libraries.SHIPPED / shipping.shipped_name(level)
        shipped.write_bytes(built.read_bytes())
        libraries.load_kernels.cache_clear()
        assert loaded(caplog) == f"{level.name}, from {shipped}"
        shipped.unlink()


def test_a_wheels_library_that_cannot_be_loaded_is_built_here(
    best: isa_levels.Level, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (libraries.SHIPPED / shipping.shipped_name(best)).write_text("made for another system")
    assert loaded(caplog).startswith(f"{best.name}, from {cache}")
    assert "cannot be loaded here" in caplog.text


def test_a_wheels_library_of_other_sources_is_left_alone(
    best: isa_levels.Level, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (libraries.SHIPPED / shipping.shipped_name(best)).write_text("not even a library")
    (libraries.SOURCES / "one.cpp").write_text(SOURCE + "// changed")
    assert loaded(caplog).startswith(f"{best.name}, from {cache}")
    assert "cannot be loaded here" not in caplog.text


def libraries_in(folder: Path) -> list[str]:
    return sorted(path.name.split("-")[1] for path in folder.glob("cpu_kernels/*.so") if path.name.count("-") == 2)


def test_a_part_is_built_when_it_is_asked_for_and_joins_the_main_librarys_threads(
    best: isa_levels.Level, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernels = libraries.load_kernels()
    assert kernels is not None
    assert libraries_in(cache) == []
    part = kernels.part("some")
    assert part is not None
    assert part["asks_the_team"]() == 7
    assert libraries_in(cache) == ["some"]
    assert kernels.part("some") is part

    libraries.load_kernels.cache_clear()
    (libraries.SOURCES / "parts" / "some" / "two.cpp").write_text("wrong")
    kernels = libraries.load_kernels()
    assert kernels is not None
    assert kernels.part("some") is None
    warning = "CPU kernels (some) are not available, so plain torch is used, which is slower: "
    assert caplog.messages[-1].startswith(warning)


def test_a_wheel_brings_parts(best: isa_levels.Level, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in shipping.build_libraries([best], cache.parent, cache.parent / "scratch"):
        library.rename(libraries.SHIPPED / library.name)
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    kernels = libraries.load_kernels()
    assert kernels is not None
    part = kernels.part("some")
    assert part is not None
    assert part["asks_the_team"]() == 7
    assert not cache.exists()
    assert libraries.builds_ahead() == []
