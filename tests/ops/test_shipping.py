"""Wheels bring the C++ kernels: built in a copy of the tree, installed in an environment where there is no compiler."""

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from quire.ops.cpu import isa_levels, shipping
from tests.ops.levels import RUNNABLE

pytestmark = pytest.mark.turns(4, among="whole systems")

ROOT = Path(__file__).parents[2]
PARTS = ("core", "executor", "frontend", "ops", "quire", "pyproject.toml", "setup.py", "README.md", "LICENSE")
BUILD = "from setuptools import build_meta; print(build_meta.build_wheel('wheels'))"


def build_wheel(folder: Path, **environment: str) -> tuple[Path, str]:
    """The wheel, and what its building says."""
    for part in map(ROOT.joinpath, PARTS):
        if part.is_dir():
            shutil.copytree(
                part, folder / part.name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
            )
        else:
            shutil.copy(part, folder)
    done = subprocess.run(
        [sys.executable, "-c", BUILD], cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("wheels/*.whl")
    return wheel, done.stdout + done.stderr


def test_a_wheel_brings_kernels_to_a_machine_without_a_compiler(tmp_path: Path) -> None:
    level = isa_levels.available()[0]
    if level == isa_levels.NATIVE or shutil.which("g++") is None:
        pytest.skip("this processor has no level, or the machine no compiler")
    library = RUNNABLE[0].library()
    hasty = tmp_path / "hasty++"  # compiles and links in no time what other tests have compiled in earnest
    hasty.write_text(f"""#!/bin/sh
        for last; do true; done
        case "$*" in
            *" c++-header "*) exec g++ "$@" -O0;;
            *" -shared "*) cp {library} kernels.so;;
            *" -c "*) touch "$(basename "$last").o";;
            *) exec g++ "$@";;
        esac
    """)
    hasty.chmod(0o755)
    wheel, _ = build_wheel(tmp_path, CXX=str(hasty), QUIRE_WHEEL_ISA=level.name)
    assert "-py3-none-linux_" in wheel.name

    venv.create(tmp_path / "venv")
    (site,) = tmp_path.glob("venv/lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(site)  # what an installer does with a wheel for one kind of machine
    (site / "others.pth").write_text("\n".join(path for path in sys.path if Path(path).name == "site-packages"))
    program = f"""if True:
        import logging, torch, quire.ops.cpu
        logging.basicConfig(level=logging.INFO)
        logging.getLogger("quire.ops").setLevel(logging.DEBUG)
        backend = quire.ops.bind("cpu")
        assert quire.ops.cpu.__file__.startswith({str(site)!r}), quire.ops.cpu.__file__
        assert isinstance(backend, quire.ops.cpu.native.NativeBackend)
        print(backend.rms_norm(torch.full((1, 8), 3.0), torch.full((8,), 2.0), 0.0).tolist())
    """
    (tmp_path / "bare").mkdir()
    done = subprocess.run(
        [tmp_path / "venv/bin/python", "-c", program],
        env={"PATH": str(tmp_path / "bare"), "HOME": str(tmp_path / "bare")},
        cwd=tmp_path / "bare",
        capture_output=True,
        text=True,
    )
    assert done.stdout == f"{[[2.0] * 8]}\n", done.stderr
    assert f"CPU kernels: {level.name}, from {site}" in done.stderr
    assert not list((tmp_path / "bare").iterdir()), "nothing is built"


def test_without_a_compiler_the_wheel_is_pure_and_says_so(tmp_path: Path) -> None:
    wheel, said = build_wheel(tmp_path, CXX="/nonexistent/c++")
    assert "-py3-none-any" in wheel.name
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    if shipping.asked_levels({}):
        assert "The wheel has no CPU kernels, which are built at the first start instead: the compiler" in said


def test_the_levels_of_a_wheel_are_named() -> None:
    every = shipping.asked_levels({})
    assert shipping.asked_levels({"QUIRE_WHEEL_ISA": "none"}) == []
    for level in every:
        assert shipping.asked_levels({"QUIRE_WHEEL_ISA": level.name}) == [level]
    assert shipping.asked_levels({"QUIRE_WHEEL_ISA": ",".join(level.name for level in every) or "none"}) == every
    with pytest.raises(ValueError, match=r"QUIRE_WHEEL_ISA must be none.*; got 'mmx'"):
        shipping.asked_levels({"QUIRE_WHEEL_ISA": "mmx"})
