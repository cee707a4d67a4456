"""The scripts for machines with an accelerator, as far as they need none."""

import json
import stat
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts/gpu"))


def test_a_bundle_has_what_the_image_lacks() -> None:
    import bundle

    missing = bundle.missing_packages(bundle.PRESENT)
    assert {"msgspec", "pyzmq", "xgrammar", "pytest-xdist"} <= set(missing)
    assert not {"torch", "numpy", "safetensors", "tokenizers", "jinja2"} & set(missing), "they come with those there"
    assert all(missing.values())
    assert "msgspec" not in bundle.missing_packages([*bundle.PRESENT, "msgspec"])


def test_names_of_packages_are_compared_as_indexes_do() -> None:
    import bundle

    assert bundle.normal("Prompt_Toolkit") == bundle.normal("prompt.toolkit") == "prompt-toolkit"


def test_the_tree_is_measured(tmp_path: Path) -> None:
    import bundle

    assert 5e6 < bundle.size_of_tree() < 60e6
    (tmp_path / "a").write_bytes(b"123")
    assert (bundle.size_of(tmp_path), bundle.size_of(tmp_path / "a"), bundle.size_of(tmp_path / "b")) == (3, 3, 0)


SANITIZER = """#!/usr/bin/env bash
echo "$@" >> "{log}"
case "$*" in *racecheck*) echo "RACECHECK SUMMARY: {hazards} hazards displayed ({hazards} errors, 0 warnings)";;
*) echo "========= ERROR SUMMARY: 0 errors";; esac
"""


@pytest.mark.parametrize("hazards", [0, 3])
def test_each_tool_of_the_sanitizer_is_run_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hazards: int
) -> None:
    import sanitizer

    program, log, results = tmp_path / "compute-sanitizer", tmp_path / "log", tmp_path / "results.jsonl"
    program.write_text(SANITIZER.format(log=log, hazards=hazards))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("GPU_RESULTS", str(results))
    monkeypatch.setattr("sys.argv", ["sanitizer.py", "--cases", "rms_norm", "route"])
    with pytest.raises(SystemExit) as ended:
        sanitizer.main()
    assert ended.value.code == (1 if hazards else 0)
    tools = [line.split()[1] for line in log.read_text().splitlines()]
    assert tools == ["memcheck", "racecheck"]
    assert log.read_text().count("rms_norm route") == 2
    told = [json.loads(line) for line in results.read_text().splitlines()]
    assert [each["sanitizer"] for each in told] == ["memcheck", "racecheck"]
    assert f"{hazards} hazards" in told[1]["outcome_of_tool"][0]


def test_a_machine_without_the_sanitizer_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sanitizer
    from part_results import write_report

    monkeypatch.setattr(sanitizer, "find_sanitizer", lambda: None)
    monkeypatch.setattr("sys.argv", ["sanitizer.py"])
    monkeypatch.setenv("GPU_RESULTS", str(tmp_path / "results.jsonl"))
    sanitizer.main()
    write_report(tmp_path / "results.jsonl", tmp_path / "report.md")
    assert "- compute-sanitizer: not installed: nothing was checked" in (tmp_path / "report.md").read_text()


def test_the_host_cost_is_that_of_steps_which_replay_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import host_cost

    replayed: list[int] = []
    monkeypatch.setattr(host_cost.Nothing, "run", lambda _: replayed.append(1))
    monkeypatch.setattr("quire.executor.worker.bind", lambda *_, **__: host_cost.NoBackend())
    figures = host_cost.measure(2, 5)
    assert figures.rows == 2
    assert figures.worker_ms > 0
    assert len(replayed) >= 5
