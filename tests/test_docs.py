"""Links of the documentation lead somewhere, and what it names exists, or is missing where it says so.

In tables, the columns "Quire's flag", "Quire's endpoint", "Quire's field" and "Quire's metric" name what there is.
Other columns speak of other programs.
"""

import importlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

import quire
from quire.core import envs
from quire.frontend.cli import serve
from quire.frontend.cli.command_group import Command, CommandGroup
from quire.frontend.cli.main import QUIRE
from quire.frontend.flags.parser import CommandParser
from quire.frontend.metrics.metrics import Metrics
from quire.frontend.openai.schema import ChatRequest, CompletionRequest
from quire.frontend.refusals.fields import UNSUPPORTED
from quire.frontend.refusals.unsupported_flags import UnsupportedFlag, unsupported
from tests.servers import ServerProcess

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    page.relative_to(ROOT) for pattern in ("*.md", "docs/**/*.md", "quire/**/*.md") for page in ROOT.glob(pattern)
)
SWITCHING, INDEX = Path("docs/switching.md"), Path("docs/index.md")
OF_USERS = [
    Path("README.md"),
    INDEX,
    Path("docs/environment.md"),
    Path("docs/examples/README.md"),
]
"""Pages that name no flags but Quire's."""
OF_DEVELOPERS = [
    Path("CONTRIBUTING.md"),
    *(Path("docs") / name for name in ("architecture.md", "cpu_kernels.md", "failure.md")),
    *sorted(page.relative_to(ROOT) for page in (ROOT / "docs/design").glob("*.md")),
]
"""Pages about the code."""

CODE = re.compile(r"`([^`\n]+)`")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
SOURCE_FILE = re.compile(r"^[\w./]+\.(?:py|cpp|h)(?=:|$)")
"""A file of ours, alone between backquotes."""
SOURCES = ("core", "executor", "frontend", "ops", "scripts", "tests", "quire/demo_model")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+(?=[=. ,`]|$)")


def text(page: Path) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", text(page)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def rows(page: Path) -> Iterator[dict[str, str]]:
    """Rows of the page's tables: cells by the heading of their column."""
    heads: list[str] = []
    for line in text(page).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")] if line.startswith("|") else []
        if not cells:
            heads = []
        elif not heads:
            heads = cells
        elif not line.startswith("|--"):
            yield dict(zip(heads, [cell.strip(" |") for cell in cells], strict=False))


def column(page: Path, head: str) -> list[str]:
    """What the cells of this column quote as code."""
    return [code for row in rows(page) for code in CODE.findall(row.get(head, ""))]


def commands(program: CommandGroup) -> Iterator[Command]:
    for command in program.commands.values():
        if isinstance(command, CommandGroup):
            yield from commands(command)
        else:
            yield command


def parser(module: str) -> CommandParser:
    made = CommandParser("quire", "Serve.")
    importlib.import_module(module).add_arguments(made)
    return made


@pytest.fixture(scope="module")
def flags() -> set[str]:
    """Flags of all commands."""
    return {flag for command in commands(QUIRE) for flag in parser(command.module).flags} | {"--help", "--version"}


@pytest.fixture(scope="module")
def refused() -> dict[str, UnsupportedFlag]:
    """Flags that a server refuses."""
    known = {**unsupported("engine"), **unsupported("server")}
    taken = parser(serve.__name__).flags
    return {flag: each for flag, each in known.items() if flag not in taken and not each.is_inert}


@pytest.fixture(scope="module")
def full_server(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with every endpoint that an option or a variable switches on."""
    folder = tmp_path_factory.mktemp("docs")
    process = ServerProcess(
        folder, str(checkpoint("llama")), "--enable-server-load-tracking", "--enable-tokenizer-info-endpoint",
        "--profiler-config", json.dumps({"profiler": "timeline", "torch_profiler_dir": str(folder)}),
        env={"QUIRE_SERVER_DEV_MODE": "1"},
    )  # fmt: skip
    yield process.wait_until_ready()
    process.stop()


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text(page))):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, anchor = link.partition("#")
        target = (ROOT / page.parent / name).resolve() if name else ROOT / page
        if not target.exists() or (anchor and anchor not in anchors(target.relative_to(ROOT))):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", OF_USERS, ids=str)
def test_flags_exist(page: Path, flags: set[str]) -> None:
    quoted = CODE.findall(FENCE.sub("", text(page)))
    shell = [line for block in FENCE.findall(text(page)) for line in block.splitlines() if line.startswith("quire ")]
    named = {flag for code in quoted + shell if "vllm" not in code for flag in FLAG.findall(code)}
    assert named - flags == set()


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_names_in_python_snippets_exist(page: Path) -> None:
    imported = [
        name.strip() for names in re.findall(r"from quire import ([\w, ]+)", text(page)) for name in names.split(",")
    ]
    assert [name for name in imported if not hasattr(quire, name)] == []


@pytest.mark.parametrize("page", [SWITCHING, INDEX], ids=str)
def test_variables_are_read(page: Path) -> None:
    named = re.findall(r"QUIRE_([A-Z_]+[A-Z])\b", text(page))
    assert [name for name in named if name not in envs.NAMES] == []


def test_flags_to_switch_to_exist(flags: set[str]) -> None:
    named = [code.split(".")[0] for code in column(SWITCHING, "Quire's flag")]
    assert len(named) > 50
    assert [flag for flag in named if flag not in flags] == []
    advised = {flag for head in ("instead", "note", "difference") for code in column(SWITCHING, head)
               for flag in FLAG.findall(code)}  # fmt: skip
    assert advised
    assert advised - flags == set()


def test_missing_flags_are_refused(refused: dict[str, UnsupportedFlag]) -> None:
    named = column(SWITCHING, "flags that are refused")
    assert [flag for flag in named if flag not in refused] == []


def test_every_missing_feature_is_told(refused: dict[str, UnsupportedFlag]) -> None:
    told = {refused[flag].reason for flag in column(SWITCHING, "flags that are refused") if flag in refused}
    missing = {each.reason for each in refused.values() if re.search(r"not (there|served|read) yet", each.reason)}
    assert missing - told == set()


def test_fields_to_switch_to_exist() -> None:
    fields = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__, "usage"} - set(UNSUPPORTED)
    named = column(SWITCHING, "Quire's field")
    assert len(named) > 20
    assert [field for field in named if field not in fields] == []


def test_missing_fields_are_refused() -> None:
    paragraph = re.search(r"^Request fields that are refused.*?\n\n", text(SWITCHING), re.MULTILINE | re.DOTALL)
    assert paragraph is not None
    assert set(CODE.findall(paragraph[0])) == set(UNSUPPORTED)


def test_metrics_to_switch_to_exist() -> None:
    there = {sample.name for family in Metrics("model", 100).collect() for sample in family.samples}
    named = column(SWITCHING, "Quire's metric")
    assert len(named) > 10
    assert [name for name in named if not {name, f"{name}_sum"} & there] == []


def test_endpoints_to_switch_to_exist(full_server: ServerProcess) -> None:
    paths = httpx.get(f"{full_server.base_url}/openapi.json").json()["paths"]
    of_index = [code for code in CODE.findall(text(INDEX)) if re.fullmatch(r"/[\w/]+", code)]
    named = {*column(SWITCHING, "Quire's endpoint"), *of_index}
    assert len(named) > 15
    undescribed = named - set(paths)
    assert [path for path in undescribed if httpx.get(full_server.base_url + path).status_code != 200] == []


def test_missing_endpoints_are_missing(full_server: ServerProcess) -> None:
    paragraph = re.search(r"^Endpoints that answer 404.*?\n\n", text(SWITCHING), re.MULTILINE | re.DOTALL)
    assert paragraph is not None
    named = CODE.findall(paragraph[0])
    assert named
    assert {httpx.post(full_server.base_url + path, json={}).status_code for path in named} == {404}


def test_runs_of_benchmarks_have_the_fields_that_the_page_describes() -> None:
    described = [name for cell in column(Path("docs/benchmarks.md"), "field") for name in cell.split(", ")]
    runs = json.loads(text(Path("docs/benchmarks.json")))
    required = set(described) - {"median", "num_runs", "floor", "floor_ratio", "note"}
    assert [run for run in runs if not required <= set(run) <= set(described)] == []
    assert [run for run in runs if not re.fullmatch(r"\d{4}-\d\d-\d\d", run["date"]) or not run["command"]] == []
    assert [run for run in runs if not (run["runs"] or "median" in run)] == []
    assert [value for run in runs for value in run["runs"] if not isinstance(value, int | float)] == []


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_files_that_are_named_exist(page: Path) -> None:
    """A name may begin below any folder: `http/errors.py`, or `errors.py` alone."""
    files = ["/" + str(path.relative_to(ROOT)) for folder in SOURCES for path in (ROOT / folder).rglob("*.*")]
    named = {name for code in CODE.findall(FENCE.sub("", text(page))) for name in SOURCE_FILE.findall(code)}
    assert [name for name in named if not any(file.endswith("/" + name.removeprefix("quire/")) for file in files)] == []


@pytest.mark.parametrize("page", OF_DEVELOPERS, ids=str)
def test_classes_that_are_named_exist(page: Path) -> None:
    defined = {
        name
        for folder in SOURCES
        for path in (ROOT / folder).rglob("*.py")
        for names in re.findall(r"^ *(?:class (\w+)|(\w+)(?::.*)? = )", path.read_text(encoding="utf-8"), re.MULTILINE)
        for name in names
    }
    quoted = (re.fullmatch(r"([A-Z]\w*[a-z]\w*)(?:\.\w+)?", code) for code in CODE.findall(FENCE.sub("", text(page))))
    assert [match[1] for match in quoted if match and match[1] not in defined] == []


def test_names_of_metrics_are_written_whole_in_the_code() -> None:
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "frontend/metrics").glob("*.py"))
    names = {f"{family.name}_total" if family.type == "counter" else family.name
             for family in Metrics("model", 100).collect()}  # fmt: skip
    assert len(names) > 30
    assert [name for name in names if f'"{name}"' not in code] == []


def test_every_promise_of_security_names_a_test_that_exists() -> None:
    rows = re.findall(r"^\| (.+?) \|([^|]*)\|([^|]*)\|$", (ROOT / "SECURITY.md").read_text(), re.MULTILINE)[1:]
    assert len(rows) > 20
    for promise, _, tests in rows:
        named = re.findall(r"`(tests/[\w/.]+)`", tests)
        if not set(promise) <= set("- "):
            assert named, f"no test holds: {promise}"
            assert [name for name in named if not (ROOT / name).exists()] == []
