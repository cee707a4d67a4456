"""The comparison with peers: engines take turns, failures stay in their row, ratios are of medians."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(autouse=True)
def _scripts_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS / "peers"))


class Counter:
    """An engine that counts up from a start, and notes whose turn it was."""

    def __init__(self, name: str, start: float, turns: list[str], *, serves: bool = True) -> None:
        self.name = name
        self.serves = serves
        self._rate = start
        self._turns = turns

    def output_rate(self, *sizes: object) -> float:
        from processes import MeasurementError

        self._turns.append(self.name)
        self._rate += 1
        if self.name == "llama.cpp" and len(self._turns) > 3:
            raise MeasurementError("out of memory")
        return self._rate


def test_engines_take_turns_and_medians_are_compared() -> None:
    import compare
    from rows import Bench, Row, offline

    turns: list[str] = []
    engines = [
        Counter("Quire", 99, turns), Counter("vLLM", 49, turns), Counter("llama.cpp", 24, turns, serves=False),
    ]  # fmt: skip
    row = Row("r", "offline", offline(4, 8, 2), {"output tok/s": "≥ 2 ×"}, served=False)
    result = compare._measure(row, engines, Bench(Path("models"), None, smoke=True), 3)
    assert turns == ["Quire", "vLLM", "llama.cpp"] * 3
    assert result["errors"] == ["llama.cpp: out of memory"] * 2
    table = compare.markdown([result]).splitlines()
    assert table[2] == "| offline | output tok/s | 101 | 51.00 | 25.00 | 1.98 × | 4.04 × | ≥ 2 × |"
    over_http = compare._measure(Row("s", "", row.measure, {}), engines, Bench(Path("models"), None, smoke=True), 0)
    assert list(over_http["runs"]) == ["Quire", "vLLM"]


def test_a_child_that_takes_too_long_or_fails_is_ended_and_told(tmp_path: Path) -> None:
    from processes import MeasurementError, run

    log = tmp_path / "log"
    assert run(["echo", "hello"], {}, 5, log) == "hello\n"
    with pytest.raises(MeasurementError, match=r"not done after 0 s"):
        run(["sleep", "60"], {}, 0.2, log)
    with pytest.raises(MeasurementError, match="ended with 3"):
        run(["sh", "-c", "exit 3"], {}, 5, log)
    assert "hello" in log.read_text()


def test_an_unknown_row_is_refused_by_name() -> None:
    script = [sys.executable, str(SCRIPTS / "peers" / "compare.py")]
    done = subprocess.run(
        [*script, "--vllm", "x", "--models", "y", "--only", "faster"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "faster" in done.stderr
    assert "offline-128-64" in done.stderr
