"""Builds of the kernels with fake compilers that fail, hang or are slow: scripts that log their calls."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from quire.ops.cpu import builder
from quire.ops.cpu.builder import PRECOMPILED
from quire.ops.cpu.builds import BuildError, KernelBuild, parts_of

PATIENCE_SECONDS = 60


class FakeCompiler:
    """A compiler that makes empty objects and libraries."""

    def __init__(self, folder: Path) -> None:
        self.path, self._calls, self._gate = folder / "fake++", folder / "calls", folder / "gate"
        self.behave("true")
        self._calls.touch()

    def behave(self, behaviour: str) -> None:
        """`behaviour` is a shell command, run before an object is made; the compiler fails if it does."""
        self.path.write_text(
            "#!/bin/sh\n"
            f'echo "$@" >> {shlex.quote(str(self._calls))}\n'
            'case "$*" in\n'
            "  *-shared*) touch kernels.so;;\n"
            f"  *) {behaviour} || exit; for last; do true; done; touch $(basename $last).o;;\n"
            "esac\n"
        )
        self.path.chmod(0o755)

    def wait_for_gate(self) -> None:
        """Makes compilations wait until `open_gate`."""
        self.behave(f"while [ ! -e {shlex.quote(str(self._gate))} ]; do sleep 0.02; done")

    def open_gate(self) -> None:
        self._gate.touch()

    @property
    def calls(self) -> list[str]:
        return self._calls.read_text().splitlines()

    @property
    def num_libraries(self) -> int:
        return sum("-shared" in call for call in self.calls)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    for name in ("a.cpp", "b.cpp", "c.h"):
        (folder / name).touch()
    return folder


@pytest.fixture
def compiler(tmp_path: Path) -> Iterator[FakeCompiler]:
    fake = FakeCompiler(tmp_path)
    yield fake
    fake.open_gate()
    until(lambda: not builders())


@pytest.fixture
def build(tmp_path: Path, sources: Path, compiler: FakeCompiler) -> Callable[..., KernelBuild]:
    def make(version: str = "fake 1", part: str = "") -> KernelBuild:
        return KernelBuild(tmp_path / "cache", sources, [str(compiler.path), "-O9"], version, part=part)

    return make


def builders() -> list[psutil.Process]:
    """Those of this process, which may have other children: servers that many tests share."""
    children = psutil.Process().children()
    return [
        child for child in children if child.status() != psutil.STATUS_ZOMBIE and builder.__file__ in child.cmdline()
    ]


def until(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.02)


def suffixes(folder: Path) -> list[str]:
    return sorted(path.suffix for path in folder.iterdir())


def test_many_builders_leave_one_library(build: Callable[..., KernelBuild], compiler: FakeCompiler) -> None:
    with ThreadPoolExecutor(4) as pool:
        (library,) = set(pool.map(lambda _: build().library(), range(4)))
    assert len(compiler.calls) == 3
    assert all("-O9" in call for call in compiler.calls)
    assert build().library() == library
    assert len(compiler.calls) == 3
    assert suffixes(library.parent) == [".lock", ".so"]


def test_a_header_for_all_sources_is_parsed_before_them(
    build: Callable[..., KernelBuild], compiler: FakeCompiler, sources: Path
) -> None:
    for name in (PRECOMPILED, "d.cpp"):
        (sources / name).touch()
    build().library()
    header, *compiled, linked = compiler.calls
    assert header.endswith(f"{sources / PRECOMPILED} -o {PRECOMPILED}.gch")
    assert [f"-include {PRECOMPILED} -c" in call for call in compiled] == [True, True, True]
    assert "-include" not in linked


def test_a_part_is_a_library_of_its_own(
    build: Callable[..., KernelBuild], compiler: FakeCompiler, sources: Path
) -> None:
    (sources / PRECOMPILED).touch()
    for name in ("team.cpp", "one/e.cpp", "other/f.cpp"):
        path = sources / "parts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert parts_of(sources) == ["one", "other"]
    library = build(part="one").library()
    assert library.name.startswith("kernels-one-")
    first, second, linked = compiler.calls
    assert sorted(call.split()[-1] for call in (first, second)) == [
        f"{sources}/parts/one/e.cpp", f"{sources}/parts/team.cpp",
    ]  # fmt: skip
    assert PRECOMPILED not in first, "the header saves nothing with so few sources"
    assert linked.endswith("e.cpp.o team.cpp.o")
    main = build().library()
    assert not any("/parts/" in call for call in compiler.calls[3:])
    path.write_text("changed")
    assert (build(part="one").library(), build().library()) == (library, main), "only the other part is built anew"
    (sources / "parts" / "one" / "e.cpp").write_text("changed")
    assert build(part="one").library() != library
    assert build().library() == main
    (sources / "c.h").write_text("changed")
    assert build().library() != main


def test_a_refusal_is_remembered_until_something_changes(
    build: Callable[..., KernelBuild], compiler: FakeCompiler, sources: Path
) -> None:
    compiler.behave("(echo In file included; echo 'a.cpp:1: error: wrong'; echo ' more of it') >&2; false")

    def refuse() -> str:
        with pytest.raises(BuildError, match=r"fake\+\+ failed: a.cpp:1: error: wrong") as raised:
            build().library()
        assert "\n" not in str(raised.value)
        return str(raised.value)

    first = refuse()
    num_calls = len(compiler.calls)
    assert refuse() == first
    assert len(compiler.calls) == num_calls, "not compiled again"

    (marker,) = (sources.parent / "cache").glob("*.failed")
    assert f"delete {marker}" in first
    assert " more of it" in marker.read_text()
    compiler.behave("true")
    refuse()
    assert build("fake 2").library().exists()
    marker.unlink()
    repaired = build().library()
    (sources / "c.h").write_text("// new")
    assert build().library() != repaired


def test_a_slow_build_goes_on_in_the_background(build: Callable[..., KernelBuild], compiler: FakeCompiler) -> None:
    compiler.wait_for_gate()
    with pytest.raises(BuildError, match="goes on in the background"):
        build().library(max_wait_s=0.3)
    (process,) = builders()
    assert process.nice() == psutil.Process().nice() + 10
    assert os.getsid(process.pid) == process.pid, "Ctrl-C in this terminal does not reach it"
    with pytest.raises(BuildError, match="another process"):
        build().library(max_wait_s=0.3)
    compiler.open_gate()
    library = build().library(max_wait_s=PATIENCE_SECONDS)
    assert library.exists()
    assert compiler.num_libraries == 1


def test_a_build_outlives_who_asked_for_it(
    build: Callable[..., KernelBuild], compiler: FakeCompiler, sources: Path
) -> None:
    compiler.wait_for_gate()
    code = f"""if True:
        from pathlib import Path
        from quire.ops.cpu.builds import KernelBuild
        folder, sources = Path({str(sources.parent / "cache")!r}), Path({str(sources)!r})
        KernelBuild(folder, sources, [{str(compiler.path)!r}, "-O9"], "fake 1").library()
    """
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True) as worker:
        until(lambda: len(compiler.calls) > 0)
        os.killpg(worker.pid, signal.SIGKILL)
    compiler.open_gate()
    assert build().library(max_wait_s=PATIENCE_SECONDS).exists()
    assert compiler.num_libraries == 1


def test_a_builder_that_is_killed_does_not_stand_in_the_way(
    build: Callable[..., KernelBuild], compiler: FakeCompiler, sources: Path
) -> None:
    cache = sources.parent / "cache"
    compiler.wait_for_gate()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(build().library)
        until(lambda: len(compiler.calls) > 0)
        (process,) = builders()
        process.kill()
        with pytest.raises(BuildError, match=r"interrupted.*will try again"):
            asked.result()
    compiler.open_gate()
    (cache / "kernels-other.build").mkdir()
    (cache / "kernels-other.build" / "a.o").touch()
    assert ".build" in suffixes(cache)
    library = build().library()
    assert library.exists()
    assert ".build" not in suffixes(cache), "nothing is left of builds that were killed"


def test_the_files_of_a_build_in_progress_are_left_alone(
    build: Callable[..., KernelBuild], compiler: FakeCompiler
) -> None:
    compiler.wait_for_gate()
    with pytest.raises(BuildError, match="background"):
        build().library(max_wait_s=0.3)
    compiler.behave("true")  # for the next caller; the first compiler's shell has read its script
    assert build("fake 2").library().exists()
    compiler.open_gate()
    assert build().library(max_wait_s=PATIENCE_SECONDS).exists()


def test_a_compiler_that_hangs_is_given_up(
    build: Callable[..., KernelBuild], compiler: FakeCompiler, tmp_path: Path
) -> None:
    compiler.behave("sleep 12345")
    for _ in range(2):
        with pytest.raises(BuildError, match=r"took longer than 0 s.*not built again"):
            build().library(max_build_s=0.3)
    until(lambda: not any("12345" in (process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])))
    assert suffixes(tmp_path / "cache") == [".failed", ".lock"]


def test_a_compiler_that_was_killed_has_refused_nothing(
    build: Callable[..., KernelBuild], compiler: FakeCompiler
) -> None:
    """A signal ends the compiler, for instance when the system shuts down."""
    compiler.behave("kill -TERM $$")
    with pytest.raises(BuildError, match="was ended by signal 15; the next start will try again"):
        build().library()
    compiler.behave("true")
    assert build().library().exists()


def test_a_compiler_on_a_full_disk_has_refused_nothing(
    build: Callable[..., KernelBuild], compiler: FakeCompiler
) -> None:
    compiler.behave("(echo 'a.cpp:9: fatal error: error writing to a.o: No space left on device' >&2; false)")
    with pytest.raises(BuildError, match="No space left on device; the next start will try again"):
        build().library()
    compiler.behave("true")
    assert build().library().exists()


def test_a_folder_that_cannot_be_written(build: Callable[..., KernelBuild], tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    with pytest.raises(OSError, match="cache"):
        build().library()


def test_a_library_that_is_there_needs_no_lock(build: Callable[..., KernelBuild]) -> None:
    """The cache may have become read-only."""
    library = build().library()
    library.with_suffix(".lock").unlink()
    assert build().library() == library
    assert suffixes(library.parent) == [".so"]


@pytest.mark.skipif(shutil.which("c++") is None or sys.platform != "linux", reason="needs a compiler of ELF files")
def test_a_function_that_there_is_not_is_missed_by_the_build(tmp_path: Path) -> None:
    sources = tmp_path / "missing"
    sources.mkdir()
    (sources / "one.cpp").write_text('int nowhere(int); extern "C" int here(int x) { return nowhere(x); }\n')
    files, made = [str(sources / "one.cpp")], str(tmp_path / "one.so")
    job = builder.Job(["c++", "-fPIC"], str(sources), files, str(tmp_path / "scratch"), made, 60)
    with pytest.raises(builder.CompilerError, match="undefined reference to `nowhere"):
        builder.build(job)
