"""Rules that can be checked automatically: which folder and which room may import which, that all are packaged, and
who may ask for a model by name."""

import ast
import functools
import os
import re
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from setuptools import find_packages

ROOT = Path(__file__).parent.parent
FOLDERS = ("core", "executor", "frontend", "ops")
MAY_IMPORT = {"core": set(), "ops": set(), "executor": {"ops", "core"}, "frontend": {"core"}}
EXECUTOR_MAY_USE_OF_CORE = {
    *("checkpoint_file", "cluster", "config", "wire", "errors", "logging", "envs", "processes", "ram", "trace"),
    *("file_reads", "light_import", "process_activity", "process_ends"),
}
ENGINE_MAIN = Path("frontend/launch/engine_main.py")

ROOMS: dict[str, dict[str, str]] = {
    "core": {
        "wire": "",
        "config": "wire",
        "cluster": "wire config",
        "kv": "wire",
        "routing": "wire",
        "scheduling": "wire config kv",
        "flight": "wire config",
        "engine": "wire config routing scheduling flight",
    },
    "executor": {
        "parallel": "",
        "weights": "",
        "backends": "",
        "timed_ops": "",
        "torch_profile": "",
        "transfers": "",
        "recordings": "",
        "sampling": "transfers",
        "layers": "parallel weights",
        "models": "parallel weights layers",
        "memory": "parallel weights layers models recordings",
        "step": "transfers sampling models layers parallel recordings",
        "device": "",
        "loaded_model": "parallel weights layers models memory",
        "adapter_loader": "weights layers",
        "worker": "backends timed_ops torch_profile transfers device loaded_model adapter_loader "
        "parallel sampling layers models memory step",
        "inspection": "backends parallel weights layers models memory",
        "processes": "parallel worker",
    },
    "frontend": {
        "checkpoint": "",
        "metrics": "",
        "outputs": "checkpoint",
        "progress": "",
        "entry_store": "",
        "refusals": "",
        "keys": "",
        "fetching": "",
        "launch": "checkpoint refusals text",
        "flags": "launch refusals",
        "text": "checkpoint",
        "helpers": "",
        "media": "fetching helpers keys",
        "grammar": "text helpers keys",
        "parsing": "",
        "parsing/arguments": "grammar parsing",
        "parsing/shapes": "grammar parsing parsing/arguments",
        "parsing/formats": "text parsing parsing/arguments parsing/shapes",
        "parsing/answers": "grammar text parsing parsing/formats parsing/shapes",
        "requests": "checkpoint keys media metrics outputs text grammar",
        "control": "metrics refusals requests checkpoint",
        "async_llm": "checkpoint metrics outputs refusals launch text parsing/answers requests control",
        "io_processors": "outputs requests async_llm",
        "chat": "checkpoint refusals grammar media metrics outputs text parsing parsing/formats parsing/answers "
        "requests async_llm",
        "offline": "checkpoint io_processors metrics media outputs progress refusals launch text requests async_llm "
        "chat",
        "llm": "metrics outputs progress refusals launch text requests async_llm offline",
        "http": "entry_store keys requests async_llm chat",
        "http/pages": "http",
        "http/invocations": "http http/pages",
        "http/service": "async_llm http http/pages",
        "http/connections": "http",
        "audio": "checkpoint keys media outputs requests async_llm chat http http/pages",
        "anthropic": "checkpoint parsing requests async_llm chat http",
        "openai": "checkpoint refusals entry_store keys outputs text parsing requests async_llm chat http "
        "http/invocations",
        "pooling": "io_processors outputs text requests async_llm chat http http/invocations openai",
        "cohere": "text requests async_llm chat http pooling",
        "tei": "outputs text requests async_llm chat http http/pages http/invocations openai pooling",
        "batch": "audio fetching progress requests async_llm chat http openai pooling",
        "http/app": "entry_store keys async_llm chat http http/pages http/invocations http/service anthropic audio "
        "openai pooling cohere tei",
        "http/server": "entry_store keys async_llm http http/connections http/pages http/service http/app",
        "bench": "checkpoint media metrics outputs progress launch text flags async_llm llm http http/server",
        "servers": "entry_store keys checkpoint media metrics launch async_llm http http/connections http/service "
        "http/server",
        "labs": "flags bench",
        "cli": "labs launch flags text grammar async_llm http http/connections batch http/server servers",
    },
}
"""What each room imports of its own folder: a room below never imports one above.

A room is a folder, a folder in it, or a file in either. `http/app.py` puts the protocols together and `http/server.py`
runs what comes of it, so they stand above the rest of http/.
"""
HELPERS = {
    "core": {
        "checkpoint_file",
        "envs",
        "errors",
        "file_reads",
        "light_import",
        "logging",
        "process_activity",
        "process_ends",
        "process_start",
        "processes",
        "ram",
        "trace",
    },
    "executor": {"light_torch", "torch_library"},
}
"""Files that all rooms of their folder may import, and that import no room."""


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imports_of(path: Path) -> set[str]:
    """Dotted names that a file imports, at any depth of nesting."""
    found: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


IN_HELPERS = {"frontend/media/image_functions.py", "frontend/media/images/rows.py", "frontend/media/narrowing.py"}
"""Files of processes that decode media, which have torch with the library of processors."""


def trespasses(path: Path) -> list[str]:
    name = path.relative_to(ROOT)
    folder = name.parts[0]
    rows = []
    for target in imports_of(path):
        parts = target.split(".")
        if parts[0] in ("torch", "triton") and folder in ("core", "frontend") and str(name) not in IN_HELPERS:
            rows.append(f"{name} imports {parts[0]}")
        if parts[0] != "quire" or len(parts) < 2 or parts[1] not in FOLDERS or parts[1] == folder:
            continue
        if parts[1] not in MAY_IMPORT[folder] and name != ENGINE_MAIN:
            rows.append(f"{name} imports {target}")
        if folder == "executor" and parts[1] == "core" and parts[2] not in EXECUTOR_MAY_USE_OF_CORE:
            rows.append(f"{name} imports {target}")
    return rows


@pytest.mark.parametrize("folder", FOLDERS)
def test_folders_import_only_what_the_table_allows(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    assert [row for path in files for row in trespasses(path)] == []


def room_of(folder: str, path: str) -> str:
    """The room of a path below `folder`: `http/app.py` or `http/app` is http/app, where that is a room of its own."""
    parts = path.removesuffix(".py").split("/")
    return next((room for room in ("/".join(parts[:2]), parts[0]) if room in ROOMS[folder]), parts[0])


def imports_of_rooms(folder: str) -> dict[str, set[str]]:
    """Rooms by the room that imports them."""
    found: dict[str, set[str]] = {room: set() for room in ROOMS[folder]}
    for path in sorted((ROOT / folder).rglob("*.py")):
        room = room_of(folder, path.relative_to(ROOT / folder).as_posix())
        if room == "__init__":
            continue
        prefix = f"quire.{folder}."
        targets = {name.removeprefix(prefix) for name in imports_of(path) if name.startswith(prefix)}
        rooms = {room_of(folder, target.replace(".", "/")) for target in targets}
        found.setdefault(room, set()).update(rooms - {room} - HELPERS.get(folder, set()))
    return {room: rooms for room, rooms in found.items() if rooms or room not in HELPERS.get(folder, set())}


@pytest.mark.parametrize("folder", ROOMS)
def test_rooms_import_what_the_table_says_and_nothing_else(folder: str) -> None:
    assert imports_of_rooms(folder) == {room: set(below.split()) for room, below in ROOMS[folder].items()}


@pytest.mark.parametrize("folder", ROOMS)
def test_no_room_imports_one_that_imports_it(folder: str) -> None:
    graph = {room: below.split() for room, below in ROOMS[folder].items()}
    assert len(list(TopologicalSorter(graph).static_order())) == len(graph)


@pytest.mark.parametrize("folder", ROOMS)
def test_the_drawing_in_the_documentation_is_the_table(folder: str) -> None:
    """An arrow is drawn to each room that is not reached by way of another."""
    below = {room: set(names.split()) for room, names in ROOMS[folder].items()}
    reached: dict[str, set[str]] = {}
    for room in TopologicalSorter(below).static_order():
        reached[room] = below[room].union(*(reached[each] for each in below[room]))
    direct = {room: below[room] - set().union(*(reached[each] for each in below[room])) for room in below}
    text = (ROOT / "docs/architecture.md").read_text()
    [drawing] = re.findall(rf"%% rooms of {folder}\n(.*?)```", text, re.DOTALL)
    drawn = {room: set(names.split(" & ")) for room, names in re.findall(r"^ +(\S+) --> (.+)$", drawing, re.MULTILINE)}
    assert drawn == {room: names for room, names in direct.items() if names}


def test_no_file_imports_one_that_imports_it() -> None:
    """Imports for type checkers alone, and those inside functions, count as well."""
    modules = {
        ".".join(["quire", *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__"): path
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
    }

    def target(name: str) -> str | None:
        return name if name in modules else name.rpartition(".")[0] if name.rpartition(".")[0] in modules else None

    graph = {module: {target(name) for name in imports_of(path)} - {None} for module, path in modules.items()}
    assert len(list(TopologicalSorter(graph).static_order())) == len(modules)


FENCED = {"executor/models/transformers": "tests/executor/models/transformers"}
"""Packages that other files know by the names in `__all__` alone, and the folder of their tests."""


@pytest.mark.parametrize(("package", "tests"), FENCED.items())
def test_a_fenced_package_is_known_by_its_own_names(package: str, tests: str) -> None:
    prefix = "quire." + package.replace("/", ".")
    [shown] = [
        ast.literal_eval(node.value)
        for node in tree_of(ROOT / package / "__init__.py").body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    outside = [
        path
        for folder in (*FOLDERS, "tests", "scripts")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not {ROOT / package, ROOT / tests} & {*path.parents}
    ]
    allowed = {prefix, *(f"{prefix}.{name}" for name in shown)}
    trespasses = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in outside
        for name in imports_of(path)
        if name.startswith(prefix + ".") and name not in allowed
    }
    assert trespasses == set()
    assert any(f"{prefix}.{name}" in imports_of(path) for path in outside for name in shown)


def test_event_streams_are_written_in_one_room() -> None:
    """Protocols hand over JSON and the kinds of events; `http/event_stream.py` knows the bytes around them."""
    writers = {
        path.relative_to(ROOT / "frontend").parts[0]
        for path in (ROOT / "frontend").rglob("*.py")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, bytes)
        if re.search(rb"(^|\n)(data|event|id|retry): ", node.value)
    }
    assert writers == {"http"}


MAY_UNPICKLE = {
    "core/wire/function_call.py",  # functions of the program, with --allow-insecure-serialization alone
    "executor/weights/tensor_files.py",  # tensors of torch.save, without their code
}
UNPICKLERS = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "_pickle"}


def test_nothing_is_unpickled() -> None:
    """Bytes of clients, checkpoints and other processes are data. A call of torch.load says `weights_only=True`."""
    importers = {
        path.relative_to(ROOT).as_posix()
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if any(name.partition(".")[0] in UNPICKLERS for name in imports_of(path))
    }
    assert importers == MAY_UNPICKLE
    loads = [
        node
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("torch.load", "np.load", "numpy.load"))
    ]
    assert loads
    for load in loads:
        given = {each.arg: ast.unparse(each.value) for each in load.keywords}
        assert given.get("weights_only") == "True" or given.get("allow_pickle") == "False", ast.unparse(load)


def test_every_promise_about_security_names_a_test() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    rows = re.findall(r"^\| (?!promise|---).*\| ((?:(?:, )?`tests/[^`]*`)+) \|$", text, re.MULTILINE)
    assert len(rows) == len(re.findall(r"^\| (?!promise)", text, re.MULTILINE)) > 10
    paths = [path for row in rows for path in re.findall("`([^`]*)`", row)]
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_requests_to_other_servers_go_through_the_fetcher() -> None:
    """Programs that are clients of a server, and what the user's own command uploads, are no part of serving."""
    clients = {"frontend/bench", "frontend/cli", "frontend/labs"}
    importers = {
        path.relative_to(ROOT).as_posix()
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if imports_of(path) & {"httpx", "aiohttp", "requests", "urllib.request", "http.client"}
        and not any((ROOT / client) in path.parents for client in clients)
    }
    assert importers == {"frontend/fetching/fetcher.py", "frontend/batch/files.py"}


def test_relative_imports_are_not_used() -> None:
    relative = [
        str(path.relative_to(ROOT))
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if any(isinstance(node, ast.ImportFrom) and node.level for node in ast.walk(tree_of(path)))
    ]
    assert relative == []


def test_every_folder_of_modules_is_packaged() -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    on_disk = {
        ".".join(["quire", *path.parent.relative_to(root).parts])
        for root, tree in [*((ROOT, ROOT / folder) for folder in FOLDERS), (ROOT / "quire", ROOT / "quire")]
        for path in tree.rglob("*.py")
    }
    assert set(find_packages(str(ROOT), include=options["include"])) == on_disk


def test_a_script_beside_the_clone_imports_the_package(tmp_path: Path) -> None:
    """The clone's folder, which is called quire as well and is no package, does not stand in its way."""
    (tmp_path / "quire").symlink_to(ROOT)
    script = tmp_path / "script.py"
    script.write_text("import quire.core\nfrom quire import SamplingParams\nprint(SamplingParams(n=2).n)")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout == "2\n", done.stderr


def test_every_environment_variable_is_documented() -> None:
    documented = set(re.findall(r"^\| `([A-Z_]+)` \|", (ROOT / "docs/environment.md").read_text(), re.MULTILINE))
    read = {
        name
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        for name in re.findall(r'(?:envs\.read(?:_float|_flag)?\(\s*"|"QUIRE_)([A-Z_]+)"', path.read_text())
    }
    assert read == documented


MODEL_NAMES = {"model_type", "architecture", "architectures"}
"""Fields of config.json and of ours that name a model, and variables of the same names."""


def is_model_name(node: ast.AST, names: set[str]) -> bool:
    """Whether an expression is a model's name: one of the variables `names`, a field, or made of these by methods."""
    match node:
        case ast.Name(id=name):
            return name in names
        case ast.Attribute(value=of, attr=name):
            return name in MODEL_NAMES or is_model_name(of, names)
        case ast.Subscript(value=of, slice=key):
            return is_field(key) or is_model_name(of, names)
        case ast.Call(func=ast.Attribute(value=of), args=args):
            return any(map(is_field, args)) or is_model_name(of, names)
        case ast.Call(func=ast.Name(id="str" | "getattr"), args=args):
            return any(is_field(arg) or is_model_name(arg, names) for arg in args)
        case ast.BoolOp(values=parts):
            return any(is_model_name(part, names) for part in parts)
    return False


def is_field(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value in MODEL_NAMES


def models_compared(tree: ast.AST) -> set[str]:
    """Texts that code compares models' names with."""
    names = set(MODEL_NAMES)
    for node in ast.walk(tree):
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.NamedExpr(target=ast.Name(id=name), value=value)
                | ast.For(target=ast.Name(id=name), iter=value)
                | ast.comprehension(target=ast.Name(id=name), iter=value)
            ) if is_model_name(value, names):
                names.add(name)
    found: set[str] = set()
    for node in ast.walk(tree):
        sides: list[ast.AST] = []
        match node:
            case ast.Compare(left=left, comparators=others):
                sides = [left, *others]
            case ast.Call(func=ast.Attribute(value=left, attr="startswith" | "endswith"), args=others):
                sides = [left, *others]
            case ast.Match(subject=left, cases=cases):
                sides = [left, *(case.pattern for case in cases)]
        values = [side for side in sides if not is_model_name(side, names)]
        if len(values) < len(sides):
            parts = [part for side in values for part in ast.walk(side) if isinstance(part, ast.Constant)]
            found |= {part.value for part in parts if isinstance(part.value, str)}
    return found


def test_only_a_models_own_file_compares_with_its_name() -> None:
    """Elsewhere a field of its configuration decides, or a table of names says what is true of each."""
    strangers = [
        f"{path.relative_to(ROOT)} compares with {name!r}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for name in models_compared(tree_of(path))
        if path.stem.replace("_", "") not in re.sub(r"[-_.]", "", name.lower())
    ]
    assert strangers == []


@pytest.mark.parametrize(
    "code",
    [
        'spec.architecture == "Gemma"',
        'config["model_type"] != "Gemma"',
        'kind = config.get("model_type", "")\nkind in ("Gemma",)',
        'str(config.get("model_type")).startswith(("Gemma",))',
        'config["architectures"][0].lower().endswith("Gemma")',
        'any("Gemma" in name for name in config.get("architectures") or [])',
        'match model_type:\n    case "Gemma" | None: pass',
    ],
)
def test_comparisons_with_models_are_found(code: str) -> None:
    assert models_compared(ast.parse(code)) == {"Gemma"}
