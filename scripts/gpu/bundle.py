"""Gathers wheels and compiled kernels for a machine that has an accelerator, torch and Triton, and no network."""

import argparse
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PRESENT = ("torch", "triton", "transformers", "pip", "setuptools")
"""What images for accelerators have, with all that these need."""
TEST_PACKAGES = ("pytest", "pytest-timeout", "pytest-xdist", "scipy")
"""What `scripts/gpu_check` needs beside the server's own packages."""
INSTALL = """#!/usr/bin/env bash
# Installs the bundle beside the packages of PYTHON, and puts the kernels where servers of TREE look.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
"${PYTHON:-python3}" -m pip install --no-index --no-deps --quiet "$here"/wheels/*.whl
if [ -e "$here/kernels.zip" ]; then cp "$here/kernels.zip" "${TREE:-.}/ops/triton/compiled.zip"; fi
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu_bundle"), help="Folder of the bundle (%(default)s).")
    parser.add_argument("--arch", default="sm_90", help="The card (%(default)s).")
    parser.add_argument("--python", default="3.12", help="That machine's version of Python (%(default)s).")
    parser.add_argument("--compiler", default=sys.executable, help="A Python that has that machine's Triton.")
    parser.add_argument("--present", nargs="+", default=PRESENT, help="Packages there, with what they need.")
    parser.add_argument("--without", nargs="+", default=[], choices=["wheels", "kernels"], help="Parts to leave out.")
    parser.add_argument("--most-mb", type=float, default=60, help="Limit of bundle and tree (%(default)s).")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if "wheels" not in args.without:
        download(missing_packages(args.present), args.out / "wheels", args.python)
    if "kernels" not in args.without:
        command = [args.compiler, "-m", "quire.ops.triton.build", "--arch", args.arch]
        subprocess.run([*command, "--archive", str(args.out / "kernels.zip")], check=True, cwd=ROOT)
    (args.out / "install").write_text(INSTALL)
    (args.out / "install").chmod(0o755)
    sizes = {
        "tree": size_of_tree(),
        "wheels": size_of(args.out / "wheels"),
        "kernels": size_of(args.out / "kernels.zip"),
    }
    print(", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in sizes.items()))
    if (total := sum(sizes.values()) / 1e6) > args.most_mb:
        sys.exit(f"{total:.1f} MB are more than --most-mb {args.most_mb:g}: name more packages in --present.")


def missing_packages(present: Iterable[str]) -> dict[str, str]:
    """What servers and the check need, and a machine with the packages `present` lacks; with the versions here.

    Raises:
        SystemExit: one of them is not installed here, so its version is not known.
    """
    own = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    needed = closure([*(Requirement(each).name for each in own), *TEST_PACKAGES])
    there = closure(present)
    missing = {name: version for name, version in needed.items() if name not in there}
    if absent := [name for name, version in missing.items() if not version]:
        sys.exit(f"not installed here, so no version is known: {', '.join(absent)}")
    return missing


def closure(names: Iterable[str]) -> dict[str, str]:
    """Packages and all that they need on this kind of machine, with their versions; an empty one if not installed."""
    found: dict[str, str] = {}
    waiting = [normal(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        try:
            package = distribution(name)
        except PackageNotFoundError:
            found[name] = ""
            continue
        found[name] = package.version
        needs = [Requirement(each) for each in package.requires or []]
        waiting += [normal(each.name) for each in needs if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found


def normal(name: str) -> str:
    """The name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def download(packages: dict[str, str], folder: Path, python: str) -> None:
    """Downloads one wheel for each package, by pip."""
    wanted = [f"{name}=={version.partition('+')[0]}" for name, version in sorted(packages.items())]
    platforms = [flag for each in ("manylinux_2_28_x86_64", "manylinux2014_x86_64") for flag in ("--platform", each)]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--python-version", python, *platforms, "--dest", str(folder), *wanted]
    subprocess.run(command, check=True)


def size_of_tree() -> int:
    """Bytes of the files that git knows."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    paths = (ROOT / name.decode() for name in listed.split(b"\0") if name)
    return sum(path.lstat().st_size for path in paths if path.is_symlink() or path.is_file())


def size_of(path: Path) -> int:
    """Bytes of a file, or of the files in a folder; 0 if there is none."""
    if path.is_file():
        return path.stat().st_size
    return sum(each.stat().st_size for each in path.rglob("*")) if path.is_dir() else 0


if __name__ == "__main__":
    main()
