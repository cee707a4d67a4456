"""Rules that can be checked automatically: which folder may import which, and that every folder is in the package."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("core", "executor", "frontend", "ops")
MAY_IMPORT = {"core": set(), "ops": set(), "executor": {"ops", "core"}, "frontend": {"core"}}
EXECUTOR_MAY_USE_OF_CORE = {
    *("config", "wire", "errors", "logging", "envs", "trace", "light_import"),
}
ENGINE_MAIN = Path("frontend/launch/engine_main.py")


def imports_of(path: Path) -> set[str]:
    """Dotted names that a file imports, at any depth of nesting."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def trespasses(path: Path) -> list[str]:
    name = path.relative_to(ROOT)
    room = name.parts[0]
    rows = []
    for target in imports_of(path):
        parts = target.split(".")
        if parts[0] in ("torch", "triton") and room in ("core", "frontend"):
            rows.append(f"{name} imports {parts[0]}")
        if parts[0] != "quire" or len(parts) < 2 or parts[1] not in ROOMS or parts[1] == room:
            continue
        if parts[1] not in MAY_IMPORT[room] and name != ENGINE_MAIN:
            rows.append(f"{name} imports {target}")
        if room == "executor" and parts[1] == "core" and parts[2] not in EXECUTOR_MAY_USE_OF_CORE:
            rows.append(f"{name} imports {target}")
    return rows


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_only_what_the_table_allows(room: str) -> None:
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    assert [row for path in files for row in trespasses(path)] == []


def test_relative_imports_are_not_used() -> None:
    relative = [
        str(path.relative_to(ROOT))
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        if any(isinstance(node, ast.ImportFrom) and node.level for node in ast.walk(ast.parse(path.read_text())))
    ]
    assert relative == []


def test_package_list_matches_the_folders() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    on_disk = {"quire"} | {
        "quire." + ".".join(init.parent.relative_to(ROOT).parts)
        for room in ROOMS
        for init in (ROOT / room).rglob("__init__.py")
    }
    assert set(settings["packages"]) == on_disk
    assert settings["package-dir"] == {"quire": "quire"} | {f"quire.{room}": room for room in ROOMS}


def test_every_environment_variable_is_documented() -> None:
    documented = set(re.findall(r"^\| `([A-Z_]+)` \|", (ROOT / "docs/environment.md").read_text(), re.MULTILINE))
    read = {
        name
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        for name in re.findall(r'(?:envs\.read(?:_float|_flag)?\(\s*"|"QUIRE_)([A-Z_]+)"', path.read_text())
    }
    assert read == documented
